"""Long prompts: early refusal, and tokenization that delays no other request."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from mlaforge.engine.request.sequence import PromptTooLong
from mlaforge.serving.prompts import PIECE, Prompts
from support.scripted_engine import ByteTokenizer, ScriptedEngine
from support.serving import serving


class WordTokenizer(ByteTokenizer):
    """One token per word of at most `longest` letters; records the lengths of its inputs, and blocks on `wait`."""

    def __init__(self, longest=20):
        self.longest, self.lengths = longest, []
        self.waiting, self.release = threading.Event(), threading.Event()

    def __call__(self, text, add_special_tokens=True):
        self.lengths.append(len(text))
        if text.startswith("wait"):
            self.waiting.set()
            assert self.release.wait(30)
        return {"input_ids": [1] * len(text.split())}

    def get_vocab(self):
        return {"x" * self.longest: 1}


def test_certainly_too_long_prompts_are_not_tokenized():
    tokenizer = WordTokenizer()
    prompts = Prompts(tokenizer, max_model_len=100)
    tokenizer.lengths.clear()
    # 7,000,000 bytes are at least 7,000,000 / (4 * 20) tokens.
    with pytest.raises(PromptTooLong, match="at least 87500 tokens, and there is room for 99"):
        prompts.encode("x" * 7_000_000, True)
    assert not tokenizer.lengths
    # If the bytes do not decide, one piece suffices.
    with pytest.raises(PromptTooLong, match="at least"):
        prompts.encode("x " * 3950, True)
    assert sum(tokenizer.lengths) <= PIECE
    # A prompt that fits is tokenized completely, independent of the length of its tokens.
    words = " ".join(["x" * 20] * 99)
    assert prompts.encode(words, True) == [1] * 99 and tokenizer.lengths[-1] == len(words)
    prompts.close()


def test_prompts_that_just_fit_are_accepted(tokenizer):
    """Texts of exactly the maximal length in tokens of the real tokenizer."""
    dice = random.Random(0)
    for text in ("the quick brown fox " * 900, "".join(dice.choices("aé漢🙂 \n", k=9000)), "é" * 12000):
        count = len(tokenizer(text)["input_ids"])
        prompts = Prompts(tokenizer, count + 1)
        assert len(prompts.encode(text, True)) == count
        prompts.close()


def test_tokenizing_in_several_threads_gives_the_same_ids(tokenizer):
    prompts = Prompts(tokenizer, 10**6)
    dice = random.Random(0)
    texts = ["".join(dice.choices("ab é漢🙂\n", k=dice.randrange(2000))) for _ in range(200)]
    expected = [prompts.encode(text, True) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: prompts.encode(text, True), texts)) == expected
    prompts.close()


def test_long_prompts_delay_no_other_request():
    """While one is tokenized, other requests are answered and streamed."""
    tokenizer = WordTokenizer(longest=100_000)
    long = {"prompt": "wait" + " " * 70_000, "max_tokens": 2}
    with serving(ScriptedEngine(tokenizer)) as served, ThreadPoolExecutor(2) as pool:
        late = [pool.submit(httpx.post, f"{served.url}/v1/completions", json=long, timeout=60) for _ in range(2)]
        assert tokenizer.waiting.wait(30)
        for stream in (True, False):
            answer = served.post("/v1/completions", json={"prompt": "x", "max_tokens": 40, "stream": stream})
            assert answer.status_code == 200
        assert not any(future.done() for future in late)
        tokenizer.release.set()
        assert [future.result().status_code for future in late] == [200, 200]
        served.settles()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_rejects_a_prompt_of_seven_million_characters(path, tokenizer, monkeypatch):
    text = "x" * 7_000_000
    payload = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    with serving(ScriptedEngine(tokenizer)) as served:
        # Tokenizing anything would give a 500.
        with monkeypatch.context() as patch:
            patch.setattr(type(tokenizer), "__call__", None)
            answer = served.post(path, json=payload)
        served.refused(answer, 400, "prompt" if "prompt" in payload else "messages")
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        served.settles()
