"""Grammar processes: costly ones are ended, and no others."""

import gc
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlaforge.checkpoint.source_model import load_tokenizer
from mlaforge.engine.sampling import grammar
from mlaforge.engine.sampling.grammar import MAX_IDLE, Grammars, wait_for
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.runtime import UserError

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59)
# In-process the first takes 15 s and 250 MiB to compile, the second goes on for ever and grows, the third is compiled
# in 1 ms, and its first mask takes 2 s whatever llguidance's own limits.
BOMBS = [
    {"json_schema": {"type": "integer", "multipleOf": 1000003}},
    {"json_schema": {"allOf": [{"multipleOf": prime} for prime in PRIMES]}},
    {"regex": "(a{1000}){1000}"},
]
# Compiled at once; then each mask takes 25 ms.
COSTLY = SamplingParams(regex="x(a{100000})")


@pytest.fixture(scope="module")
def tokenizer(tiny_models):
    return load_tokenizer(tiny_models["llama"])


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer)


@pytest.fixture
def impatient(monkeypatch):
    """A budget that is used up soon, and no waiting for the processor on a busy machine."""
    monkeypatch.setattr(grammar, "CHECK", {**grammar.CHECK, "seconds": 0.3, "nice": 0})


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids


def allowed(place):
    wait_for([place], 60)
    assert place.error is None, place.error
    return {8 * at + bit for at, byte in enumerate(place.mask) for bit in range(8) if byte >> bit & 1}


def parent(number):
    """Of a process, and its state; None where it is gone."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[1])


def children(process):
    """Numbers of the processes of grammars."""
    numbers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return {number for number in numbers if parent(number) == process.pid}


def children_time(grammars):
    """Seconds of processor time that they have taken."""
    fields = [
        Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split() for child in children(grammars._process)
    ]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def until(holds):
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: str(bomb)[:60])
def test_rejects_costly_grammar_with_the_reason(bomb, grammars, impatient):
    spent = os.times()
    with pytest.raises(UserError, match=r"cannot be followed: it takes more (processor|than 128 MiB)") as caught:
        grammars.check(SamplingParams(**bomb))
    assert "\n" not in str(caught.value)
    # Not by this process, and no process is left.
    assert os.times().user - spent.user < 0.3
    until(lambda: not children(grammars._process))
    # It is known now.
    begin = time.perf_counter()
    with pytest.raises(UserError, match="takes more"):
        grammars.check(SamplingParams(**bomb))
    assert time.perf_counter() - begin < 0.1


def test_memory_is_bounded_too(tokenizer, monkeypatch):
    monkeypatch.setattr(grammar, "CHECK", {"seconds": 20.0, "bytes": 16 * 2**20, "nice": 0})
    with pytest.raises(UserError, match=r"takes more than 128 MiB of memory"):
        Grammars(tokenizer).check(SamplingParams(**BOMBS[0]))


def test_a_bad_grammar_does_not_keep_a_good_one_waiting(grammars, impatient):
    good, bad = SamplingParams(regex="[ab]+"), SamplingParams(json_schema={"type": "integer", "multipleOf": 1000033})
    grammars.check(good)
    place = grammars.follow(bad)
    other = grammars.follow(good)
    assert len(allowed(other)) == 2
    assert place.waiting
    wait_for([place], 60)
    assert "takes more" in place.error and place.mask is None
    other.advance([next(iter(allowed(other)))])
    assert len(allowed(other)) == 3
    place.close()
    other.close()


def test_costly_masks_fail_only_their_text(tokenizer, grammars, monkeypatch):
    """Also where another text follows the same grammar in the same process."""
    monkeypatch.setattr(grammar, "FOLLOW", {**grammar.FOLLOW, "seconds": 0.5})
    grammars.check(COSTLY)
    (x,), (a,) = ids(tokenizer, "x"), ids(tokenizer, "a")
    costly, other = grammars.follow(COSTLY), grammars.follow(COSTLY)
    assert allowed(other) == allowed(costly) == {x}
    costly.advance([x])
    for _ in range(2000):
        wait_for([costly], 60)
        if costly.error:
            break
        costly.advance([a])
    assert "processor time" in costly.error
    other.advance([x])
    assert allowed(other) == {a}
    costly.close()
    other.close()


def test_dead_process_fails_only_the_requested_mask(tokenizer):
    grammars = Grammars(tokenizer)
    params = SamplingParams(regex="[ab]{3}x")
    grammars.check(params)
    until(lambda: not children(grammars._process))
    places = [grammars.follow(params) for _ in range(3)]
    (a,), (b,), (x,) = (ids(tokenizer, letter) for letter in "abx")
    for place in places:
        assert allowed(place) == {a, b}
        place.advance([a, b])
        assert allowed(place) == {a, b}
    # Requests with one grammar share a process.
    (child,) = children(grammars._process)
    os.kill(child, signal.SIGSTOP)
    places[0].advance([a])
    places[1].advance([b])
    os.kill(child, signal.SIGKILL)
    assert allowed(places[1]) == {x}
    assert not places[0].waiting and "its process was ended (-9)" in places[0].error
    # It did not ask, so it does not know yet.
    places[2].advance([b])
    assert allowed(places[2]) == {x}
    for place in places:
        place.close()


def test_death_of_an_idle_process_fails_no_text(tokenizer):
    grammars = Grammars(tokenizer)
    params = SamplingParams(regex="[cd]{3}x")
    grammars.check(params)
    until(lambda: not children(grammars._process))
    place = grammars.follow(params)
    assert len(allowed(place)) == 2
    (child,) = children(grammars._process)
    os.kill(child, signal.SIGKILL)
    # Its parent takes notice a moment after it is gone.
    until(place.grammar._has_died)
    place.advance(ids(tokenizer, "cdc"))
    assert allowed(place) == set(ids(tokenizer, "x"))
    place.close()


def test_processes_end_with_their_grammars(tokenizer):
    """Those of grammars that nobody follows any more, but for the newest; and all of them with the engine."""
    grammars = Grammars(tokenizer)
    for length in range(MAX_IDLE + 5):
        params = SamplingParams(regex=f"[ab]{{{length + 1}}}")
        grammars.check(params)
        place = grammars.follow(params)
        allowed(place)
        place.close()
    process = grammars._process
    until(lambda: len(children(process)) == MAX_IDLE + 1)
    left = children(process)
    del grammars, place
    # Again and again: it does nothing while another thread is collecting.
    until(lambda: gc.collect() >= 0 and process.poll() is not None)
    assert process.returncode == 0
    until(lambda: not any(parent(number) for number in left))


def test_dead_parent_is_restarted(tokenizer):
    grammars = Grammars(tokenizer)
    grammars.check(SamplingParams(regex="a"))
    os.kill(grammars._process.pid, signal.SIGKILL)
    grammars._process.wait()
    place = grammars.follow(SamplingParams(regex="ab"))
    assert allowed(place) == set(ids(tokenizer, "a"))
    place.close()


def test_ignores_terminal_signals(grammars, tokenizer):
    grammars.check(SamplingParams(regex="a"))
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(grammars._process.pid, number)
    place = grammars.follow(SamplingParams(regex="ba"))
    assert allowed(place) == set(ids(tokenizer, "b"))
    place.close()


def test_killed_check_is_not_cached(tokenizer, impatient):
    grammars, params = Grammars(tokenizer), SamplingParams(json_schema={"type": "integer", "multipleOf": 1000003})
    grammars.check(SamplingParams(regex="a"))
    until(lambda: not children(grammars._process))
    with ThreadPoolExecutor() as pool:
        checked = pool.submit(grammars.check, params)
        until(lambda: children(grammars._process))
        for child in children(grammars._process):
            os.kill(child, signal.SIGKILL)
        with pytest.raises(UserError, match=r"its process was ended \(-9\)"):
            checked.result()
    with pytest.raises(UserError, match="processor time"):
        grammars.check(params)


def test_failed_text_leaves_no_timer_running(tokenizer, monkeypatch):
    """Its process goes on with others for longer than its budget, in masks that take long."""
    monkeypatch.setattr(grammar, "FOLLOW", {**grammar.FOLLOW, "seconds": 0.5})
    grammars = Grammars(tokenizer)
    grammars.check(COSTLY)
    (x,), (a,) = ids(tokenizer, "x"), ids(tokenizer, "a")
    wrong = grammars.follow(COSTLY)
    wrong.advance([a])
    wait_for([wrong], 60)
    assert "it does not allow token" in wrong.error
    used = children_time(grammars)
    while children_time(grammars) - used < 0.8:
        right = grammars.follow(COSTLY)
        right.advance([x])
        assert allowed(right) == {a}
        right.close()
    wrong.close()
