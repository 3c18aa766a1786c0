// Streams a chat answer of kvferry: node client.mjs FOLDER_OF_THE_PROTOS 127.0.0.1:9000 "Why is the sky blue?"
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const [folder, address, prompt] = process.argv.slice(2);
const options = { includeDirs: [folder], keepCase: true, defaults: true };
const definition = loader.loadSync("kvferry/v1/inference.proto", options);
const { Inference } = grpc.loadPackageDefinition(definition).kvferry.v1;
const client = new Inference(address, grpc.credentials.createInsecure());
const metadata = new grpc.Metadata(); // with API keys: metadata.set("authorization", `Bearer ${key}`)

const stream = client.Generate(
  { chat: { messages: [{ role: "user", content: prompt }] }, sampling: { temperature: 0, max_tokens: 64 } },
  metadata,
  { deadline: Date.now() + 120_000 },
);
stream.on("data", (part) => process.stdout.write(part.text));
stream.on("end", () => process.stdout.write("\n"));
stream.on("error", (error) => {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
});
