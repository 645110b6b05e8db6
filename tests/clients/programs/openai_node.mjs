// The openai package for Node: Chat Completions and Responses.
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { assert, checkCall, MAX_TOKENS, MODEL, PARAMETERS, QUESTION, run, URL, Weather } from "./cases.mjs";

const client = new OpenAI({ baseURL: URL, apiKey: "none", maxRetries: 0, timeout: 60000 });
const user = { role: "user", content: QUESTION };
const chat = { model: MODEL, messages: [user], max_tokens: MAX_TOKENS };
const definition = { name: "get_weather", description: "The weather in a city.", parameters: PARAMETERS };
const tools = [{ type: "function", function: definition }];
const calling = { ...chat, tools, parallel_tool_calls: false };
const respond = { model: MODEL, input: QUESTION, max_output_tokens: MAX_TOKENS };

async function toolLoop(tool_choice) {
  const { message } = (await client.chat.completions.create({ ...calling, tool_choice })).choices[0];
  checkCall(message.tool_calls[0].function.name, message.tool_calls[0].function.arguments);
  const results = message.tool_calls.map(({ id }) => ({ role: "tool", tool_call_id: id, content: "4 °C, cloudy" }));
  const messages = [user, message, ...results];
  const answer = await client.chat.completions.create({ ...calling, messages, tool_choice: "none" });
  assert(answer.choices[0].message.content);
}

async function responsesToolLoop(tool_choice) {
  const options = { ...respond, tools: [{ type: "function", strict: false, ...definition }], parallel_tool_calls: false };
  const answer = await client.responses.create({ ...options, tool_choice });
  const calls = answer.output.filter((item) => item.type === "function_call");
  checkCall(calls[0].name, calls[0].arguments);
  const results = calls.map(({ call_id }) => ({ type: "function_call_output", call_id, output: "4 °C, cloudy" }));
  const input = [user, ...answer.output, ...results];
  assert((await client.responses.create({ ...options, input, tool_choice: "none" })).output_text);
}

await run(["openai"], {
  models: async () => {
    const names = [];
    for await (const model of client.models.list()) names.push(model.id);
    assert(names.includes(MODEL));
  },
  chat: async () => {
    const answer = await client.chat.completions.create(chat);
    assert(answer.choices[0].message.content && answer.usage.total_tokens > 0);
  },
  stream_with_usage: async () => {
    let text = "", usage;
    const stream = await client.chat.completions.create({ ...chat, stream: true, stream_options: { include_usage: true } });
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert(text && usage.completion_tokens > 0);
  },
  tools_auto: () => toolLoop("auto"),
  tools_required: () => toolLoop("required"),
  tools_named: () => toolLoop({ type: "function", function: { name: "get_weather" } }),
  tools_required_in_a_stream: async () => {
    const stream = client.chat.completions.stream({ ...calling, tool_choice: "required" });
    const { message } = (await stream.finalChatCompletion()).choices[0];
    checkCall(message.tool_calls[0].function.name, message.tool_calls[0].function.arguments);
  },
  run_tools: async () => {
    const calls = [];
    const callable = { ...definition, function: (args) => (calls.push(args.city), "4 °C, cloudy"), parse: JSON.parse };
    const runner = client.chat.completions.runTools({ ...chat, tools: [{ type: "function", function: callable }] });
    assert((await runner.finalContent()) && calls.length);
  },
  structured: async () => {
    const answer = await client.chat.completions.parse({ ...chat, response_format: zodResponseFormat(Weather, "weather") });
    Weather.parse(answer.choices[0].message.parsed);
  },
  responses: async () => {
    const answer = await client.responses.create({ ...respond, instructions: "Be brief." });
    assert(answer.output_text && answer.usage.output_tokens > 0);
  },
  responses_in_a_stream: async () => {
    const stream = client.responses.stream(respond);
    const kinds = new Set();
    for await (const event of stream) kinds.add(event.type);
    assert(kinds.has("response.output_text.delta") && (await stream.finalResponse()).output_text);
  },
  responses_tools_auto: () => responsesToolLoop("auto"),
  responses_tools_required: () => responsesToolLoop("required"),
  responses_structured: async () => {
    const answer = await client.responses.parse({ ...respond, text: { format: zodTextFormat(Weather, "weather") } });
    Weather.parse(answer.output_parsed);
  },
});
