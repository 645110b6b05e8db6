// Vercel's AI SDK: `ai` with the provider given as argument, @ai-sdk/openai or @ai-sdk/openai-compatible.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { assert, checkCall, MAX_TOKENS, MODEL, QUESTION, run, URL, Weather } from "./cases.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const openai = createOpenAI({ baseURL: URL, apiKey: "none" });
const compatible = createOpenAICompatible({
  name: "mlaforge", baseURL: URL, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true,
});
const [provider] = process.argv.slice(2);
const models = {
  "@ai-sdk/openai": { responses: openai(MODEL), chat: openai.chat(MODEL) },
  "@ai-sdk/openai-compatible": { chat: compatible(MODEL) },
}[provider];
const calls = [];
const providerOptions = { openai: { parallelToolCalls: false }, mlaforge: { parallel_tool_calls: false } };
const get_weather = tool({
  description: "The weather in a city.",
  inputSchema: z.object({ city: z.string().max(20) }),
  execute: ({ city }) => (calls.push(city), "4 °C, cloudy"),
});

function cases(api, model) {
  const options = { model, prompt: QUESTION, maxOutputTokens: MAX_TOKENS, maxRetries: 0, providerOptions };
  const agent = { ...options, tools: { get_weather }, stopWhen: stepCountIs(3) };
  const unexecuted = { ...options, tools: { get_weather: tool({ ...get_weather, execute: undefined }) } };
  const onError = () => {};
  return {
    [`${api}`]: async () => {
      const { text, usage } = await generateText({ ...options, system: "Be brief." });
      assert(text && usage.outputTokens > 0);
    },
    [`${api}_in_a_stream`]: async () => {
      const result = streamText({ ...options, onError });
      const pieces = await collect(result.textStream);
      assert(pieces.join("") && (await result.usage).outputTokens > 0);
    },
    [`${api}_tools_required`]: async () => {
      const { toolCalls } = await generateText({ ...unexecuted, toolChoice: "required" });
      checkCall(toolCalls[0].toolName, toolCalls[0].input);
    },
    [`${api}_tools_named`]: async () => {
      const toolChoice = { type: "tool", toolName: "get_weather" };
      const { toolCalls } = await generateText({ ...unexecuted, toolChoice });
      checkCall(toolCalls[0].toolName, toolCalls[0].input);
    },
    [`${api}_agent`]: async () => {
      calls.length = 0;
      const { text } = await generateText(agent);
      assert(calls.length && text);
    },
    [`${api}_agent_in_a_stream`]: async () => {
      calls.length = 0;
      const result = streamText({ ...agent, onError });
      assert((await result.text) && calls.length);
    },
    [`${api}_two_turns`]: async () => {
      const first = { role: "user", content: QUESTION };
      const { response } = await generateText({ ...options, prompt: undefined, messages: [first] });
      const messages = [first, ...response.messages, { role: "user", content: "And in Rome?" }];
      assert((await generateText({ ...options, prompt: undefined, messages })).text);
    },
    [`${api}_structured`]: async () => {
      const { output } = await generateText({ ...options, output: Output.object({ schema: Weather }) });
      Weather.parse(output);
    },
    [`${api}_structured_in_a_stream`]: async () => {
      const result = streamText({ ...options, output: Output.object({ schema: Weather }), onError });
      Weather.parse(await result.output);
    },
  };
}

async function collect(stream) {
  const pieces = [];
  for await (const piece of stream) pieces.push(piece);
  return pieces;
}

await run(
  [provider, "ai"],
  Object.assign({}, ...Object.entries(models).map(([api, model]) => cases(api, model))),
);
