// The Vercel AI SDK: text, a stream, a tool and a form, over chat completions, Responses and Messages.
import assert from "node:assert";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
const baseURL = `${url}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const models = {
  compatible: createOpenAICompatible({ name: "blockdraft", baseURL, supportsStructuredOutputs: true })(name),
  chat: openai.chat(name),
  responses: openai.responses(name),
  messages: createAnthropic({ baseURL, apiKey: "none" })(name),
};
const weather = tool({
  description: "The weather of a city.",
  inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }),
  execute: async ({ city }) => `It is sunny in ${city}.`,
});

for (const [kind, model] of Object.entries(models)) {
  const options = { model, temperature: 0, maxOutputTokens: 48, maxRetries: 0 };
  const prompt = "What is the capital of France?";
  const whole = await generateText({ ...options, prompt });
  assert.match(whole.text, /Paris/);
  let text = "";
  for await (const part of streamText({ ...options, prompt }).textStream) text += part;
  assert.equal(text, whole.text);

  // The second step may not call again: it answers with the result of the first.
  const used = await generateText({
    ...options,
    prompt: "How is the weather in Paris?",
    tools: { weather },
    stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
  });
  assert.ok(["Paris", "Rome"].includes(used.steps[0].toolCalls[0].input.city));
  assert.ok(used.text.length > 0);

  if (kind !== "messages") {
    const schema = z.object({ name: z.string().max(20), isCapital: z.boolean() });
    const form = await generateText({ ...options, prompt, output: Output.object({ schema }) });
    assert.equal(typeof form.output.isCapital, "boolean");
  }
  process.stdout.write(`${kind}: ok\n`);
}
