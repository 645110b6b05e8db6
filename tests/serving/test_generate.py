"""`generate` and `chat` on the command line print the engine's output."""

import itertools
import json
import re

import pytest

from mlaforge.engine.engine import Engine
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.runtime import UserError
from mlaforge.serving.config import ChatConfig
from mlaforge.serving.generate import Conversation
from support.engine_driver import watched

QUICK = ("--dtype", "float32", "--device", "cpu", "--cache-bytes", 1 << 20)


@pytest.fixture(scope="module")
def llama(tiny_models):
    return tiny_models["llama"]


@pytest.fixture(scope="module")
def llm(llama):
    return watched(llama)


def printed(done):
    assert done.exit_code == 0, done.stderr
    return done.stdout


def answers(llm, turns, **params):
    """Return the expected answers of a conversation, each computed from a separate prompt."""
    messages, texts = [], []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        text = llm.chat(messages, SamplingParams(**params))[0].outputs[0].text
        messages.append({"role": "assistant", "content": text})
        texts.append(text)
    return texts


def test_chat_reads_turns_from_stdin(llama, llm, cli):
    """Turns continue the conversation until /new; the end of the input ends the chat."""
    done = cli(
        "chat", llama, *QUICK, "--max-new-tokens", 12, "--temperature", 0, stdin="Hello\nAnd you?\n/new\nAnd you?\n"
    )  # fmt: skip
    first = answers(llm, ["Hello", "And you?"], temperature=0.0, max_tokens=12)
    (anew,) = answers(llm, ["And you?"], temperature=0.0, max_tokens=12)
    assert first[1] != anew
    assert printed(done) == f"> {first[0]}\n> {first[1]}\n> > {anew}\n> "


def test_an_empty_line_ends_a_chat(llama, cli):
    assert printed(cli("chat", llama, *QUICK, stdin="\nHello\n")) == "> "
    assert printed(cli("chat", llama, *QUICK, stdin="")) == "> "


def test_a_chat_with_a_system_prompt_and_a_seed(llama, llm, cli):
    """At the default temperature the output depends on the seed alone."""
    outputs = [
        printed(cli("chat", llama, *QUICK, "--max-new-tokens", 9, "--seed", seed, *more, stdin="Hi\n"))
        for seed, more in ((1, ()), (1, ()), (2, ()), (1, ("--system", "Be brief.")))
    ]
    assert outputs[0] == outputs[1] and len(set(outputs)) == 3
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = llm.chat(messages, SamplingParams(temperature=0.7, top_p=0.95, seed=1, max_tokens=9))[0].outputs[0].text
    assert outputs[3] == f"> {text}\n> "


def test_an_interrupted_turn_is_not_in_the_history(llama):
    """Its blocks are released."""
    talk = Conversation(str(llama), ChatConfig(dtype="float32", device="cpu", cache_bytes=1 << 20, temperature=0.0))
    answer = talk.answer("Tell me everything.")
    next(answer)
    assert talk.llm.engine.stats().cache_blocks_used > 0
    answer.close()
    assert talk.messages == []
    assert talk.llm.engine.stats().cache_blocks_used == 0
    before = talk.llm.engine.stats().cached_prompt_tokens
    assert "".join(piece.text for piece in talk.answer("Tell me everything.")) == talk.messages[-1]["content"]
    # Its computed prefix is reused.
    assert talk.llm.engine.stats().cached_prompt_tokens - before == 32
    assert [message["role"] for message in talk.messages] == ["user", "assistant"]


def test_ctrl_c_interrupts_an_answer_but_not_the_chat(llama, llm, cli, monkeypatch):
    steps = itertools.count()
    step = Engine.step

    def interrupted(engine):
        if next(steps) == 5:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    done = cli("chat", llama, *QUICK, "--max-new-tokens", 12, "--temperature", 0, stdin="Hello\nAnd you?\n")
    monkeypatch.undo()
    (hello,) = answers(llm, ["Hello"], temperature=0.0, max_tokens=5)
    (later,) = answers(llm, ["And you?"], temperature=0.0, max_tokens=12)
    first, _, rest = printed(done).partition(" [interrupted]")
    # Of a character that is not whole yet nothing was shown.
    assert first.startswith("> ") and hello.rstrip("\ufffd").startswith(first[2:].rstrip("\ufffd")) and len(first) > 2
    assert rest == f"\n> {later}\n> "


def test_chat_needs_a_template(model):
    directory = model("llama")
    (directory / "chat_template.jinja").unlink()
    talk = Conversation(str(directory), ChatConfig(dtype="float32", device="cpu", cache_bytes=1 << 20))
    with pytest.raises(UserError, match=r"^llama has no chat template; use a plain prompt$"):
        next(talk.answer("Hi"))


def generated(cli, model, *more):
    """The text that the command prints."""
    text = printed(cli("generate", model, *QUICK, "--prompt", "The capital", "--max-new-tokens", 10, *more))
    match = re.search(r"\A\n> The capital\n\n\[llama: [\d.]+ tokens/s, [^\n]*\]\n(.*)\n\n\Z", text, re.DOTALL)
    assert match, text
    return match[1]


def test_generate_samples_with_a_seed(llama, llm, cli):
    params = {"max_tokens": 10}
    (greedy,) = llm.generate("The capital", SamplingParams(temperature=0.0, **params))
    assert generated(cli, llama) == generated(cli, llama, "--seed", 5) == greedy.outputs[0].text
    for more in (
        {"temperature": 1.0, "seed": 5},
        {"temperature": 2.0, "seed": 6},
        {"temperature": 2.0, "top_p": 0.5, "seed": 6},
    ):
        options = [part for name, value in more.items() for part in (f"--{name.replace('_', '-')}", value)]
        (drawn,) = llm.generate("The capital", SamplingParams(**more, **params))
        assert generated(cli, llama, *options) == drawn.outputs[0].text != greedy.outputs[0].text
    free = {generated(cli, llama, "--temperature", 2) for _ in range(3)}
    assert len(free) == 3


def test_generate_with_the_chat_template(llama, llm, cli):
    (answer,) = answers(llm, ["The capital"], temperature=0.0, max_tokens=10)
    assert generated(cli, llama, "--chat") == answer


@pytest.mark.parametrize(("options", "piped", "prompt"), [
    (("--prompt", "-"), "The capital\n", "The capital"), ((), "The capital\n", "The capital"),
    ((), "two\nlines, é\n\n", "two\nlines, é\n"), (("--prompt", "ab"), "The capital\n", "ab"),
    ((), None, "The capital of France is"),
])  # fmt: skip
def test_generate_reads_a_piped_prompt(options, piped, prompt, llama, llm, cli):
    done = cli("generate", llama, "--dtype", "float32", "--cache-bytes", 1 << 20, "--max-new-tokens", 10, *options,
               stdin=piped)  # fmt: skip
    (output,) = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=10))
    assert done.exit_code == 0 and output.outputs[0].text in done.stdout, done.stderr


@pytest.mark.parametrize(("piped", "words"), [
    ("", "--prompt - reads standard input, which is empty"), (b"\xff\xfe", "standard input is not UTF-8: byte 0"),
])  # fmt: skip
def test_rejects_piped_input_that_is_not_text(piped, words, llama, cli):
    done = cli("generate", llama, "--prompt", "-", stdin=piped)
    assert done.exit_code == 2 and words in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--temperature", -1), "temperature = -1.0 must be a finite number of at least 0"),
        (("--top-p", 0), "top_p = 0.0 must be above 0 and at most 1"),
        (("--max-new-tokens", 0), "max_new_tokens = 0 must be at least 1"),
        (("--cache-bytes", 2 * 16 * 768, "--prompt", "x" * 32), "there is room for 31"),
        (("--cache-bytes", 9), "cache_bytes = 9 does not hold one short sequence"),
        (("--max-num-seqs", 1000, "--device", "cpu"), "max_num_batched_tokens = 512 must be at least max_num_seqs"),
        (("--prompt", ""), "the prompt is empty"),
    ],
)
def test_generate_rejects_illegal_options(options, words, llama, refused):
    refused(words, "generate", llama, "--dtype", "float32", "--cache-bytes", 31 * 16 * 768, *options)


def test_generate_writes_its_measurements(llama, llm, cli, tmp_path):
    out = tmp_path / "out"
    first = printed(cli("generate", llama, out, *QUICK, "--max-new-tokens", 6, "--temperature", 1, "--seed", 3))
    (run,) = json.loads((out / "manifest.json").read_text())["metrics"]["runs"]
    prompt = llm.tokenizer("The capital of France is")["input_ids"]
    (drawn,) = llm.generate([prompt], SamplingParams(max_tokens=6, seed=3))
    assert (run["text"], run["new_tokens"]) == (drawn.outputs[0].text, 6)
    assert run["cached_tokens"] == len(prompt) + 5
    assert run["cache_bytes"] == -(-run["cached_tokens"] // 16) * 16 * 768
    # Another seed is another result; the same seed returns the stored one.
    again = ("generate", llama, out, *QUICK, "--max-new-tokens", 6, "--temperature", 1)
    assert printed(cli(*again, "--seed", 3)) == first
    assert cli(*again, "--seed", 4).exit_code == 2


def test_two_compared_models_use_one_dtype(llama, converted, cli, monkeypatch, tmp_path):
    """Independent of the choice of `auto` for the second one alone; logged once."""
    units = iter(["AMX", None])
    monkeypatch.setattr("mlaforge.engine.execution.model.bfloat16_unit", lambda: next(units))
    more = ("--max-new-tokens", 2, "--device", "cpu", "--cache-bytes", 1 << 20)
    done = cli("generate", llama, tmp_path / "out", "--against", converted("llama", "latent"), *more)
    assert done.exit_code == 0 and done.stderr.count("dtype auto: bfloat16 (") == 1, done.stderr
    runs = json.loads((tmp_path / "out" / "manifest.json").read_text())["metrics"]["runs"]
    assert [run["dtype"] for run in runs] == ["bfloat16", "bfloat16"]
