// Zod: the schemas of its kinds are accepted as they are, except for those that docs/structured-outputs.md names.

import assert from "node:assert/strict";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const text = z.string();
const both = [z.object({ a: text }), z.object({ b: z.number() })];
const tree = z.object({ name: text, get children() { return z.array(tree); } });
const kinds = {
  string: text, email: z.email(), uuid: z.uuid(), guid: z.guid(), url: z.url(), httpUrl: z.httpUrl(), emoji: z.emoji(),
  base64: z.base64(), base64url: z.base64url(), nanoid: z.nanoid(), cuid: z.cuid(), cuid2: z.cuid2(), ulid: z.ulid(),
  xid: z.xid(), ksuid: z.ksuid(), ipv4: z.ipv4(), ipv6: z.ipv6(), cidrv4: z.cidrv4(), cidrv6: z.cidrv6(), mac: z.mac(),
  e164: z.e164(), jwt: z.jwt(), hex: z.hex(), hostname: z.hostname(), hash: z.hash("sha256"), date: z.iso.date(),
  time: z.iso.time(), datetime: z.iso.datetime(), duration: z.iso.duration(), lowercase: text.lowercase(),
  uppercase: text.uppercase(), startsWith: text.startsWith("ab"), endsWith: text.endsWith("yz"),
  includes: text.includes("mm"), regex: text.regex(/^[a-c]{2,4}$/), lengths: text.min(2).max(5), trim: text.trim(),
  templateLiteral: z.templateLiteral(["v", z.number()]), stringbool: z.stringbool(), number: z.number(), int: z.int(),
  int32: z.int32(), positive: z.number().positive(), multipleOf: z.number().multipleOf(5), boolean: z.boolean(),
  null: z.null(), any: z.any(), unknown: z.unknown(), json: z.json(), literal: z.literal(["a", 1, true]),
  enum: z.enum(["x", "y"]), array: z.array(text).min(1).max(3), nonempty: z.array(text).nonempty(),
  tuple: z.tuple([text, z.number()]), tupleRest: z.tuple([text], z.number()), object: both[0],
  strictObject: z.strictObject({ a: text }), looseObject: z.looseObject({ a: text }), partial: both[0].partial(),
  catchall: both[0].catchall(z.number()), record: z.record(text, z.number()),
  recordOfEnum: z.record(z.enum(["k", "l"]), z.number()),
  partialRecord: z.partialRecord(z.enum(["k", "l"]), z.number()), union: z.union([text, z.number()]),
  discriminatedUnion: z.discriminatedUnion("t", [z.object({ t: z.literal("a") }), z.object({ t: z.literal("b") })]),
  intersection: z.intersection(both[0], both[1]), xor: z.xor(both), nullable: text.nullable(),
  nullish: z.object({ a: text.nullish() }), default: z.object({ a: text.default("q") }),
  prefault: z.object({ a: text.prefault("q") }), readonly: z.array(text).readonly(), recursive: tree,
  describe: text.describe("d"), meta: text.meta({ title: "t", examples: ["e"] }), brand: text.brand(),
};
const refused = [];
for (const [kind, schema] of Object.entries(kinds)) {
  for (const io of ["input", "output"]) {
    const body = {
      model,
      max_tokens: 1,
      prompt: "x",
      structured_outputs: { json: z.toJSONSchema(schema, { io, target: "draft-7" }) },
    };
    const answer = await fetch(`${url}/v1/completions`, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body),
    });
    if (!answer.ok) refused.push(`${kind} ${io}: ${(await answer.json()).error.message}`);
  }
}
const named = refused.map((line) => line.split(":")[0]);
assert.deepEqual(named, ["duration input", "duration output", "xor input"], refused.join("\n"));
