"""Tiny sparse models, made once."""

import pytest


@pytest.fixture(scope="session")
def sparse(converted, tiny_models, calibration_file, shared):
    # Not earlier: torch reads the number of threads that tests/conftest.py sets when it is imported.
    from mlaforge.sparsity import sparsify
    from mlaforge.sparsity.config import SparsifyConfig

    made = {}

    def get(family, layout, **options):
        key = (family, layout, *options.items())
        if key not in made:
            name = "-".join(map(str, ("sparse", family, layout, *sum(options.items(), ()))))
            coded = {"bits": 6} if layout == "coded" else {}
            layout = "latent" if coded else layout
            model = tiny_models[family] if layout == "gqa" else converted(family, layout, **coded)
            sizes = {"topk": 40, "width": 16, "sink": 2, "window": 12, "seqlen": 64, "nsamples": 6, **options}
            config = SparsifyConfig(text=str(calibration_file), device="cpu", **sizes)
            made[key] = shared(f"{name}/model", lambda out: sparsify.run(str(model), out, config))
        return made[key]

    return get
