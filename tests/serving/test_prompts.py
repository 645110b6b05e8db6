"""Long prompts: refused before they cost anything, and nobody waits for them."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from mlaforge.engine.request.sequence import PromptTooLong
from mlaforge.serving.prompts import PIECE, Prompts
from support.scripted_engine import ByteTokenizer, ScriptedEngine, load_tokenizer
from support.serving import serving


class WordTokenizer(ByteTokenizer):
    """A token for each word, of `longest` letters at most; it notes what it is given, and waits where that asks it."""

    def __init__(self, longest=20):
        self.longest, self.lengths = longest, []
        self.waiting, self.forget_interrupts = threading.Event(), threading.Event()

    def __call__(self, text, add_special_tokens=True):
        self.lengths.append(len(text))
        if text.startswith("wait"):
            self.waiting.set()
            assert self.forget_interrupts.wait(30)
        return {"input_ids": [1] * len(text.split())}

    def get_vocab(self):
        return {"x" * self.longest: 1}


def test_what_is_surely_too_long_is_not_tokenized():
    tokenizer = WordTokenizer()
    prompts = Prompts(tokenizer, max_model_len=100)
    tokenizer.lengths.clear()
    # 7,000,000 bytes are at least 7,000,000 / (4 * 20) tokens, whatever they are.
    with pytest.raises(PromptTooLong, match="at least 87500 tokens, and there is room for 99"):
        prompts.encode("x" * 7_000_000, True)
    assert not tokenizer.lengths
    # Where the bytes alone leave a doubt, a piece is enough.
    with pytest.raises(PromptTooLong, match="at least"):
        prompts.encode("x " * 3950, True)
    assert sum(tokenizer.lengths) <= PIECE
    # What fits is tokenized whole, however long its tokens are.
    words = " ".join(["x" * 20] * 99)
    assert prompts.encode(words, True) == [1] * 99 and tokenizer.lengths[-1] == len(words)
    prompts.close()


def test_pieces_refuse_nothing_that_fits(tmp_path):
    """Texts in the real tokenizer's tokens, at the very limit."""
    tokenizer = load_tokenizer(tmp_path)
    dice = random.Random(0)
    for text in ("the quick brown fox " * 900, "".join(dice.choices("aé漢🙂 \n", k=9000)), "é" * 12000):
        count = len(tokenizer(text)["input_ids"])
        prompts = Prompts(tokenizer, count + 1)
        assert len(prompts.encode(text, True)) == count
        prompts.close()


def test_several_threads_tokenize_as_one(tmp_path):
    tokenizer = load_tokenizer(tmp_path)
    prompts = Prompts(tokenizer, 10**6)
    dice = random.Random(0)
    texts = ["".join(dice.choices("ab é漢🙂\n", k=dice.randrange(2000))) for _ in range(200)]
    expected = [prompts.encode(text, True) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: prompts.encode(text, True), texts)) == expected
    prompts.close()


def test_nobody_waits_for_a_long_prompt():
    """While one is tokenized, others are asked, answered and streamed."""
    tokenizer = WordTokenizer(longest=100_000)
    long = {"prompt": "wait" + " " * 70_000, "max_tokens": 2}
    with serving(ScriptedEngine(tokenizer)) as served, ThreadPoolExecutor(2) as pool:
        late = [pool.submit(httpx.post, f"{served.url}/v1/completions", json=long, timeout=60) for _ in range(2)]
        assert tokenizer.waiting.wait(30)
        for stream in (True, False):
            answer = served.post("/v1/completions", json={"prompt": "x", "max_tokens": 40, "stream": stream})
            assert answer.status_code == 200
        assert not any(each.done() for each in late)
        tokenizer.forget_interrupts.set()
        assert [each.result().status_code for each in late] == [200, 200]
        served.settles()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_prompt_of_seven_million_characters(path, tmp_path, monkeypatch):
    text = "x" * 7_000_000
    tokenizer = load_tokenizer(tmp_path)
    asked = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    with serving(ScriptedEngine(tokenizer)) as served:
        # It would be a 500 if anything were tokenized.
        with monkeypatch.context() as patch:
            patch.setattr(type(tokenizer), "__call__", None)
            answer = served.post(path, json=asked)
        served.refused(answer, 400, "prompt" if "prompt" in asked else "messages")
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        served.settles()
