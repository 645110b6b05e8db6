"""The endpoints, through OpenAI's client."""

import json
import threading

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mlaforge.serving.replies import TextChoice
from support.scripted_engine import ScriptedEngine, load_tokenizer
from support.serving import serving


@pytest.fixture(scope="module")
def client(served):
    return served.client()


def expected_text(engine, prompt, count, index=0):
    return engine.tokenizer.decode([engine.expected(prompt, index, at) for at in range(count)])


def test_completion(served, client):
    ids = served.engine.tokenizer("Hello")["input_ids"]
    answer = client.completions.create(model="scripted", prompt="Hello", max_tokens=30)
    assert answer.choices[0].text == expected_text(served.engine, ids, 30)
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-") and answer.model == "scripted"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 30, 35)


def test_max_tokens_defaults_to_openais_16(client):
    assert client.completions.create(model="scripted", prompt="x").usage.completion_tokens == 16


@pytest.mark.parametrize("n", [1, 3])
def test_all_kinds_of_prompts_are_answered_in_order(served, client, n):
    tokenizer = served.engine.tokenizer
    texts = ["one", "two two", "three three three"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    expected = [expected_text(served.engine, prompt, 12, index) for prompt in ids for index in range(n)]
    for prompt in (texts, ids):
        answer = client.completions.create(model="scripted", prompt=prompt, max_tokens=12, n=n)
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == list(range(3 * n))
    single = client.completions.create(model="scripted", prompt=ids[1], max_tokens=12, n=n)
    assert [choice.text for choice in single.choices] == expected[n : 2 * n]


@pytest.mark.parametrize("options", [
    {}, {"n": 3}, {"logprobs": 2}, {"echo": True, "logprobs": 1}, {"stop": ["fox", "zzz"], "n": 2},
    {"echo": True}, {"max_tokens": 0, "echo": True, "logprobs": 1}, {"stop": "🙂"},
])  # fmt: skip
def test_streamed_completion_equals_whole(client, options):
    payload = {"model": "scripted", "prompt": ["héllo 漢", "b"], "max_tokens": 60, **options}
    whole = client.completions.create(**payload)
    texts, reasons, logprobs = {}, {}, {}
    chunks = list(client.completions.create(**payload, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks:
        assert chunk.object == "text_completion" and chunk.id == chunks[0].id
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
            for name, values in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
                logprobs.setdefault(choice.index, {}).setdefault(name, []).extend(values)
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices
    for choice in whole.choices:
        assert texts[choice.index] == choice.text
        assert reasons[choice.index] == choice.finish_reason
        assert logprobs.get(choice.index) == (choice.logprobs.model_dump() if choice.logprobs else None)


@pytest.mark.parametrize("stream", [True, False])
def test_many_log_probabilities_are_serialised_in_a_thread(served, stream, monkeypatch):
    """8,000 tokens with 20 alternatives each take a second, during which the event loop would be blocked."""
    payload = {"prompt": "ab", "max_tokens": 3, "logprobs": 2, "stream": stream}
    threads = []
    chunk = TextChoice.chunk
    monkeypatch.setattr(
        TextChoice, "chunk", lambda *args: (threads.append(threading.current_thread().name), chunk(*args))[1]
    )
    for more in ({}, {"prompt_logprobs": 2}):
        threads.clear()
        assert served.post("/v1/completions", json=payload | more).status_code == 200
        assert threads[0].startswith("asyncio") == bool(more)


def test_continuous_usage_is_in_every_chunk(served):
    payload = {"prompt": "a", "max_tokens": 3, "stream": True}
    payload["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    events = served.post("/v1/completions", json=payload).text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    used = [json.loads(event.removeprefix("data: "))["usage"]["completion_tokens"] for event in events[:-2]]
    assert used == sorted(used) and used[-1] == 3


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_scores_the_prompt_for_lm_eval(served, client, max_tokens, as_ids):
    """lm-eval's local-completions reads token_logprobs and top_logprobs of prompt tokens by position."""
    text = "héllo wörld"
    ids = served.engine.tokenizer(text)["input_ids"]
    prompt = [ids] if as_ids else text
    answer = client.completions.create(model="scripted", prompt=prompt, max_tokens=max_tokens, echo=True, logprobs=1)
    choice, logprobs = answer.choices[0], answer.choices[0].logprobs
    assert choice.text.startswith(text) and (choice.text == text) == (max_tokens == 0)
    assert choice.finish_reason == "length"
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(ids) + max_tokens
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert all(p == -0.5 for p in logprobs.token_logprobs[1:])
    for token, top in zip(logprobs.tokens[1:], logprobs.top_logprobs[1:], strict=True):
        assert max(top, key=top.get) == token
    # h, é in two bytes, llo: a token begins at the end of the complete text before it.
    assert logprobs.tokens[:4] == ["h", "bytes:\\xc3", "bytes:\\xa9", "l"]
    assert logprobs.text_offset[:5] == [0, 1, 1, 2, 3]
    assert answer.usage.completion_tokens == max_tokens


def test_offsets_without_echo_count_from_the_prompts_beginning(client):
    logprobs = client.completions.create(model="scripted", prompt="abc", max_tokens=2, logprobs=0).choices[0].logprobs
    assert logprobs.text_offset == [3, 4] and all(len(top) == 1 for top in logprobs.top_logprobs)


def test_prompt_logprobs_in_vllms_shape(served):
    payload = {"prompt": "ab", "max_tokens": 1, "prompt_logprobs": 1}
    (choice,) = served.post("/v1/completions", json=payload).json()["choices"]
    first, second = choice["prompt_logprobs"]
    assert first is None
    (entry,) = second.values()
    assert entry == {"logprob": -0.5, "decoded_token": "b"}


def test_chat_renders_the_template(served, client):
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    answer = client.chat.completions.create(model="scripted", messages=messages, max_tokens=9)
    text = "<s>system: S\n<s>user: a\nb\nassistant:"
    ids = served.engine.tokenizer(text)["input_ids"]
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.choices[0].message.content == expected_text(served.engine, ids, 9)
    assert answer.choices[0].message.role == "assistant" and answer.object == "chat.completion"
    # An answer may be sent back unchanged, including nulls.
    again = client.chat.completions.create(
        model="scripted", messages=[*messages, answer.choices[0].message.model_dump()], max_completion_tokens=4
    )
    assert again.usage.completion_tokens == 4


@pytest.mark.parametrize("options", [{}, {"n": 2, "logprobs": True, "top_logprobs": 2}, {"stop": ["dög"]}])
def test_streamed_chat_equals_whole(client, options):
    payload = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 50, **options}
    whole = client.chat.completions.create(**payload)
    chunks = list(client.chat.completions.create(**payload, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage == whole.usage
    for choice in whole.choices:
        choice_chunks = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert choice_chunks[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in choice_chunks) == choice.message.content
        assert [c.finish_reason for c in choice_chunks if c.finish_reason] == [choice.finish_reason]
        entries = [entry for c in choice_chunks if c.logprobs for entry in c.logprobs.content]
        assert entries == (choice.logprobs.content if choice.logprobs else [])


def test_chat_logprobs(client):
    payload = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    content = client.chat.completions.create(**payload, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert len(content) == 3 and all(len(entry.top_logprobs) == 2 for entry in content)
    assert all(bytes(e.bytes).decode() == e.token for e in content if not e.token.startswith("bytes:"))


def test_tools_and_variables_reach_the_template(tmp_path):
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.chat_template = (
        "{{ tools[0].function.name if tools else 'none' }}|{{ colour }}|{% for m in messages %}{{ m.role }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.x }}{% endfor %}{{ m.content }}{% endfor %}"
        "{% if messages[0].content == 'bad' %}{{ raise_exception('no bad words') }}{% endif %}"
        "{% if messages[0].content == 'worse' %}{{ 1 + messages }}{% endif %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 5}'}}
    history = [{"role": "user", "content": "u"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    history.append({"role": "tool", "content": "r", "tool_call_id": "1"})
    with serving(ScriptedEngine(tokenizer)) as served:

        def length(**options):
            payload = {"messages": history, "max_tokens": 1, **options}
            return served.post("/v1/chat/completions", json=payload).json()["usage"]["prompt_tokens"]

        assert length(tools=[tool]) == len("f||useruassistant5toolr>")
        assert length(tools=[tool], tool_choice="none") == len("none||useruassistant5toolr>")
        assert length(chat_template_kwargs={"colour": "red"}) == len("none|red|useruassistant5toolr>")
        assert length(add_generation_prompt=False) == len("none||useruassistant5toolr")
        for word in ("bad", "worse"):
            payload = {"messages": [{"role": "user", "content": word}]}
            message = served.refused(served.post("/v1/chat/completions", json=payload), 400, "messages")
            assert "template" in message
        payload = {"messages": history, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}
        served.refused(served.post("/v1/chat/completions", json=payload), 400, "chat_template_kwargs")
        tokenizer.chat_template = None
        served.refused(served.post("/v1/chat/completions", json={"messages": history}), 400, "messages")


def test_models_health_and_version_endpoints(served, client):
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").id == "scripted"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")
    with pytest.raises(openai.NotFoundError) as error:
        client.completions.create(model="other", prompt="x")
    assert error.value.code == "model_not_found" and error.value.param == "model"
    assert served.http.get("/health").json() == {"status": "ok", "non_finite_requests": 0}
    assert "version" in served.http.get("/version").json()


def test_served_model_name(tokenizer):
    with serving(ScriptedEngine(tokenizer), served_model_name="mine") as served:
        assert served.client().completions.create(model="mine", prompt="x").model == "mine"


def test_metrics_count_requests_and_tokens(tokenizer):
    with serving(ScriptedEngine(tokenizer)) as served:
        for _ in range(3):
            served.post("/v1/completions", json={"prompt": "abcd", "max_tokens": 8, "n": 2})
        served.post("/v1/completions", json={"prompt": 5})
        served.settles()
        samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(served.http.get("/metrics").text)
            for sample in family.samples
        }
    assert samples["mlaforge_prompt_tokens_total", ()] == 12
    assert samples["mlaforge_generated_tokens_total", ()] == 48
    assert samples["mlaforge_requests_total", (("endpoint", "completions"), ("status", "200"))] == 3
    assert samples["mlaforge_requests_total", (("endpoint", "completions"), ("status", "400"))] == 1
    assert samples["mlaforge_time_to_first_token_seconds_count", ()] == 6
    assert samples["mlaforge_inter_token_seconds_count", ()] == 42
    assert samples["mlaforge_request_seconds_count", ()] == 3
    assert samples["mlaforge_cache_usage_ratio", ()] == 0 and samples["mlaforge_engine_up", ()] == 1
