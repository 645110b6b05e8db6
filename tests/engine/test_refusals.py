"""What the engine does not do: every refusal is one line that names the value and what would be right, and it leaves
the engine as it was."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest

from mlaforge.engine.llm import LLM
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.runtime import UserError
from support.engine_driver import Oracle, greedy, idle, random_prompts, watched

PROMPT, OTHER = random_prompts(21, 30)


@pytest.fixture(scope="module")
def llama(tiny_models):
    return tiny_models["llama"]


@pytest.fixture(scope="module")
def llm(llama):
    """28 blocks of 16, by which the 512 tokens of context are cut to 448; 8 sequences."""
    return watched(llama, cache_bytes=28 * 16 * 768, max_num_seqs=8)


def refused(match, call, *arguments, **options):
    with pytest.raises(UserError, match=rf"^{match}$") as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size = 0 must be at least 1"),
        ({"max_num_seqs": -1}, "max_num_seqs = -1 must be at least 1"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens = 0 must be at least 1"),
        ({"cache_fraction": 0.0}, "cache_fraction = 0.0 must be above 0 and at most 1"),
        ({"cache_fraction": 1.5}, "cache_fraction = 1.5 must be above 0 and at most 1"),
        ({"cache_fraction": float("nan")}, "cache_fraction = nan must be above 0 and at most 1"),
        ({"cache_bytes": 0}, "cache_bytes = 0 must be at least 1"),
        ({"max_model_len": 0}, "max_model_len = 0 must be at least 1"),
        (
            {"max_num_seqs": 64, "max_num_batched_tokens": 63},
            "max_num_batched_tokens = 63 must be at least max_num_seqs = 64: every running sequence takes one",
        ),
        ({"block_sise": 3}, r"unknown key 'block_sise'; did you mean 'block_size'\?"),
        ({"block_size": "16"}, "block_size = '16' must be a whole number"),
        ({"dtype": "float8"}, "dtype = 'float8' must be one of auto, .*, int8, int4.*"),
        ({"device": "tpu"}, "device 'tpu' is not known to torch; use auto, cpu or cuda"),
    ],
    ids=str,
)
def test_rejects_invalid_settings(options, message, llama):
    refused(message, LLM, llama, **{"device": "cpu", **options})


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
def test_rejects_cache_too_small_for_a_sequence(family, tiny_models):
    """And the bytes that the refusal names do."""
    with pytest.raises(UserError, match=r"^cache_bytes = 9 does not hold one short sequence in blocks of 16") as caught:
        watched(tiny_models[family], cache_bytes=9)
    need = int(str(caught.value).split("at least ")[1].split()[0])
    with pytest.raises(UserError, match=rf"^cache_bytes = {need - 1} does not hold"):
        watched(tiny_models[family], cache_bytes=need - 1)
    llm = watched(tiny_models[family], cache_bytes=need)
    oracle = Oracle(tiny_models[family])
    oracle.check(PROMPT, llm.generate([PROMPT], greedy(11))[0].outputs[0].token_ids, 11)
    assert llm.engine.stats().cache_bytes <= need
    idle(llm.engine)


def test_rejects_missing_model(tmp_path):
    with pytest.raises(UserError, match=r"nothing does not exist; give a model directory, a \.gguf file or a hub id"):
        LLM(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], greedy(1), "the prompt is empty; it must have at least one token"),
        ("", greedy(1), "the prompt is empty; it must have at least one token"),
        (
            [5, 260],
            greedy(1),
            "the prompt has token 260, but the model's vocabulary has 260: it comes from another model's tokenizer",
        ),
        ([-1], greedy(1), "the prompt has token -1, but the model's vocabulary has 260: .*"),
        (
            [1] * 448,
            greedy(1),
            "This model's maximum context length is 448 tokens, but the prompt has 448 tokens, and .* room for 447; .*",
        ),
        (
            [1] * 449,
            SamplingParams(max_tokens=0, prompt_logprobs=0),
            "This model's maximum context length is 448 tokens, but the prompt has 449 tokens, and .* room for 448; .*",
        ),
        (PROMPT, greedy(1, n=9), "n = 9 is more than max_num_seqs = 8"),
        (PROMPT, greedy(1, stop_token_ids=(260,)), "stop_token_ids names token 260, but the vocabulary has 260"),
        (PROMPT, greedy(1, logit_bias={999: 1.0}), "logit_bias names token 999, but the vocabulary has 260"),
    ],
)
def test_rejects_invalid_requests(prompt, params, message, llm):
    before = llm.engine.stats()
    refused(message, llm.generate, [prompt], params)
    assert llm.engine.stats() == before
    idle(llm.engine)


def test_one_invalid_prompt_aborts_the_others(llm):
    refused("the prompt is empty; .*", llm.generate, [PROMPT, OTHER, []], greedy(3))
    idle(llm.engine)
    refused("2 sampling parameters for 1 prompts; give one, or one per prompt", llm.generate, [PROMPT], [greedy(1)] * 2)
    idle(llm.engine)


def test_accepts_vllm_prompts(llm):
    """The ids count where text stands beside them, as in vLLM."""
    ids = llm.tokenizer("ab")["input_ids"]
    wanted = [output.outputs[0].token_ids for output in llm.generate(["ab", ids], greedy(4))]
    for prompt in ({"prompt": "ab"}, {"prompt_token_ids": ids}, {"prompt_token_ids": tuple(ids), "prompt": "other"}):
        for prompts in (prompt, [prompt, prompt]):
            outputs = llm.generate(prompts, greedy(4))
            assert len(outputs) == (1 if isinstance(prompts, dict) else 2)
            assert all(
                output.prompt_token_ids == ids and output.outputs[0].token_ids == wanted[0] for output in outputs
            )


@pytest.mark.parametrize("prompt", [
    {"text": "ab"}, {}, {"prompt": None}, {"prompt": "ab", "multi_modal_data": {}}, {"prompt": [1, "a"]},
    {"prompt_token_ids": "ab"}, {"prompt_token_ids": [1.0]}, b"ab", None, 5, 1.5, {5}, [True], [[1, 2.0]], ["a", None],
    [["a"]], [{"prompt": 5}],
], ids=repr)  # fmt: skip
def test_rejects_non_prompt_inputs(prompt, llm):
    """What is iterable must not pass for a prompt: of a dict that would be the names of its fields."""
    right = r'.*a prompt is a text, a list of token ids, \{"prompt": text\} or \{"prompt_token_ids": ids\}.*'
    refused(right, llm.generate, prompt, greedy(1))
    idle(llm.engine)


def test_several_threads_take_turns(llm):
    """Each gets its own texts, whoever steps for it: in whole, streamed, and broken off."""
    prompts = random_prompts(*range(5, 29), seed=3)
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, greedy(9))]

    def ask(number):
        prompt = prompts[number]
        if number % 3 == 0:
            (output,) = llm.generate([prompt], greedy(9))
            return output.outputs[0].token_ids
        stream = llm.stream([prompt], greedy(9))
        if number % 3 == 1:
            return [token for output in stream for token in output.outputs[0].token_ids]
        first = next(stream).outputs[0].token_ids
        stream.close()
        return first

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(ask, range(len(prompts)), timeout=120))
    assert [made == want[: len(made)] for made, want in zip(got, expected, strict=True)] == [True] * len(prompts)
    assert all(len(made) == 9 for number, made in enumerate(got) if number % 3 < 2)
    idle(llm.engine)


def test_rejects_token_in_a_list_of_prompts(llm):
    message_pattern = "token 5 is in a list of prompts; a prompt is a text, a list of token ids, .*"
    refused(message_pattern, llm.generate, ["a", 5])
    refused(message_pattern, llm.generate, [5, [6, 7]])


def test_a_sequence_ends_with_the_cache(llama, llm, capsys):
    """The context is cut to what the cache holds, which is said; a sequence ends there and other lengths are not
    refused."""
    log_line = "context limited to 448 tokens, the size of the cache; see --cache-bytes"
    again = watched(llama, cache_bytes=28 * 16 * 768, max_num_seqs=8)
    assert log_line in capsys.readouterr().err and again.engine.max_model_len == llm.engine.max_model_len == 448
    for wanted in (9, None):
        (output,) = llm.generate([[1] * 440], dataclasses.replace(greedy(1), max_tokens=wanted))
        assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (8, "length")
        idle(llm.engine)
    (output,) = llm.generate([[1] * 448], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert len(output.prompt_logprobs) == 448
    (output,) = watched(llama).generate([[1] * 512], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert len(output.prompt_logprobs) == 512
    assert "context limited" not in capsys.readouterr().err


def test_rejects_request_id_in_use(llm):
    engine = llm.engine
    engine.add("a", PROMPT, greedy(2))
    refused("request id 'a' is in use; give another", engine.add, "a", OTHER, greedy(2))
    while engine.has_work:
        engine.step()
    engine.add("a", OTHER, greedy(2))
    engine.abort("a")
    engine.add("a", OTHER, greedy(2))
    engine.step()
    engine.abort("a")
    engine.abort("a")
    engine.abort("never")
    idle(engine)
    assert engine.step() == []


def test_rejects_a_channel_without_harmony(llm):
    params = SamplingParams(stop="x", stop_channel="final")
    refused("stop_channel = 'final' needs a model that speaks harmony", llm.generate, [PROMPT], params)
    idle(llm.engine)


def test_aborting_in_every_state(llama):
    """Waiting, in the middle of the prompt, decoding, preempted: nothing of it is left, and the others go on."""
    oracle = Oracle(llama)
    llm = watched(llama, cache_bytes=8 * 16 * 768, max_num_batched_tokens=16, max_num_seqs=3)
    engine, states = llm.engine, set()
    for steps in range(30):
        engine.add("stays", OTHER, greedy(60))
        engine.add("goes", PROMPT, greedy(60, n=2))
        engine.add("waits", PROMPT, greedy(2))
        got = []
        for _ in range(steps):
            got += engine.step()
        goes = engine._requests["goes"].sequences
        states |= {
            (s in engine.scheduler.running, s in engine.scheduler.waiting, s.prefilled, s.computed > 0) for s in goes
        }
        engine.abort("goes")
        engine.check_integrity()
        while engine.has_work:
            got += engine.step()
        ids = [token for output in got if output.request_id == "stays" for token in output.outputs[0].token_ids]
        oracle.check(OTHER, ids, 60)
        idle(engine)
    # (running, waiting, its prompt was computed, some is in the cache): not forked yet, waiting, in the prompt,
    # decoding, preempted (its full blocks are still cached).
    assert states == {
        (False, False, False, False),
        (False, True, False, False),
        (True, False, False, True),
        (True, False, True, True),
        (False, True, True, True),
    }


def test_rejects_chat_without_template(llm, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    refused("llama has no chat template; use a plain prompt", llm.chat, [{"role": "user", "content": "Hi"}])


def test_reports_template_errors(llm, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "chat_template", "{{ raise_exception('no\nsystem turn') }}")
    words = "the model's chat template refuses these messages: no system turn"
    refused(words, llm.chat, [{"role": "system", "content": "Hi"}])


@pytest.mark.parametrize("messages", [[], "Hi", {"role": "user"}, ["Hi"], [{"role": "user"}, []], 5], ids=str)
def test_rejects_non_conversation_inputs(messages, llm):
    right = r'which is a list of {"role", "content"} turns, or a list of conversations'
    refused(f"messages must be a conversation, {right}", llm.chat, messages)
    two = [[{"role": "user", "content": "Hi"}]] * 2
    words = "1 sampling parameters for 2 conversations; give one, or one per conversation"
    refused(words, llm.chat, two, [greedy(1)])
    idle(llm.engine)
