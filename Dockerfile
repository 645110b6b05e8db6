# Images of `mlaforge serve`, for CPUs and for NVIDIA GPUs (docs/serving.md#containers):
#     docker build --target cpu -t mlaforge:cpu --build-arg TORCH_INDEX=URL .
#     docker build --target cuda -t mlaforge:cuda .
# TORCH_INDEX: index of torch's builds, such as PyTorch's index of CPU builds; by default pip's, which has the CUDA
# build for x86-64. Each target checks that it got its build.

# Python 3.11, the version of the tests.
FROM debian:bookworm-slim AS python
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home mlaforge \
    && install -d -o mlaforge -g mlaforge /cache
# Models of the hub, dequantised models and compiled Triton kernels.
ENV HF_HOME=/cache/huggingface MLAFORGE_HOME=/cache/mlaforge TRITON_CACHE_DIR=/cache/triton
VOLUME /cache

FROM python AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv
WORKDIR /build
COPY constraints.txt ./
ARG TORCH_INDEX
RUN pip install --no-cache-dir -c constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
COPY pyproject.toml README.md LICENSE ./
COPY src src
# All forms of the CPU kernels: a container starts at once on any processor and needs no compiler.
RUN pip install --no-cache-dir -c constraints.txt '.[serve,constrained,harmony,gguf]' \
    && mlaforge build-kernels --out /opt/kernels

FROM python AS runtime
COPY --from=build /opt/kernels /opt/kernels
COPY --from=build /opt/venv /opt/venv
ENV MLAFORGE_KERNELS=/opt/kernels
USER 1000:1000
WORKDIR /cache
EXPOSE 8000
# The port of `serve`; loading a model may take minutes.
HEALTHCHECK --interval=30s --timeout=10s --start-period=10m \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=8)"]
ENTRYPOINT ["mlaforge"]
# `serve` listens on 127.0.0.1, which a published port does not reach: give `--host 0.0.0.0` and MLAFORGE_API_KEY.
CMD ["serve", "--help"]

FROM runtime AS cpu
RUN python -c "import torch; assert torch.version.cuda is None, \
    'this torch is a CUDA build: set TORCH_INDEX to an index of CPU builds'"

FROM runtime AS cuda
# Triton compiles a launcher for every kernel. CUDA's libraries come with torch, the driver's with the NVIDIA Container
# Toolkit.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 0:0
RUN python -c "import torch; assert torch.version.cuda, \
    'this torch is a CPU build: set TORCH_INDEX to an index of CUDA builds'" \
    && apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev \
    && rm -rf /var/lib/apt/lists/*
USER 1000:1000
