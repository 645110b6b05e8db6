// Cases of a Node client's program: each prints one line of JSON, as those of cases.py do.
import { readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { z } from "zod";

export const URL = process.env.MLAFORGE_URL;
export const MODEL = process.env.MLAFORGE_MODEL;
// As in cases.py.
export const QUESTION = "Say only the word yes: is Paris sunny?";
export const MAX_TOKENS = 48;
export const PARAMETERS = {
  type: "object",
  properties: { city: { type: "string", maxLength: 20 } },
  required: ["city"],
};
export const Weather = z.strictObject({ city: z.string().max(20), sky: z.enum(["clear", "cloudy"]) });

export function assert(condition, message) {
  if (!condition) throw new Error(message ?? "assertion failed");
}

export function checkCall(name, args) {
  assert(name === "get_weather", `called ${name}`);
  const values = typeof args === "string" ? JSON.parse(args) : args;
  assert(typeof values.city === "string", JSON.stringify(values));
}

// `cases`: name -> function without arguments, which may be asynchronous.
export async function run(packages, cases) {
  const modules = join(dirname(fileURLToPath(import.meta.url)), "..", "node_modules");
  const version = (name) => JSON.parse(readFileSync(join(modules, name, "package.json"))).version;
  console.log(JSON.stringify({ client: packages.map((name) => `${name} ${version(name)}`).join(", ") }));
  for (const [name, run] of Object.entries(cases)) {
    let error = null;
    try {
      await run();
    } catch (exception) {
      const line = (exception.stack ?? "").split("\n").find((line) => line.includes("/programs/")) ?? "";
      error = `${exception.name}: ${exception.message} ${exception.responseBody ?? ""} (${line.trim()})`.slice(0, 2000);
    }
    console.log(JSON.stringify({ case: name, ok: error === null, error }));
  }
}
