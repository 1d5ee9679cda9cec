// Fetches, when it is called, the runtime and one model, once a page: {file, run(inputs)}, where `file` is what the model's
// JSON file holds, and inputs and outputs are lists (of lists) of numbers by name. Each file of the runtime must have the
// hash that it had when this was written.
const PLACE = "this browser", WAIT = "Fetching the model, and the program of 4 MB that runs it \u2026";
const ORT = "https://cdn.jsdelivr.net/npm/onnxruntime-web@1.30.0/dist/";
const HASHES = {
  "ort.wasm.min.js": "sha384-Bw6URI+Gvoadw0do7/QrSHUC9D1vCYYK5OSqChFyhyV5mzPL4oe2rOAFljAnS8Sq",
  "ort-wasm-simd-threaded.mjs": "sha384-XcXA/MtAf0WpB8e023xQH9CM7RIjiugakT7x99DIwpFf7k56BIFFcAPerIF7FDad",
  "ort-wasm-simd-threaded.wasm": "sha384-vjBJ1z7qrhkTyYsNqKeF6c7N+nOJSU94czEo+tvZcu8G75JparGq9kB+kTnEUNVM",
};
const got = async (address, options) => {
  const answer = await fetch(address, options);
  if (!answer.ok) throw new Error(`${answer.status} at ${address}`);
  return answer;
};
const pinned = name => got(ORT + name, {integrity: HASHES[name]});
const runtime = async () => {
  const script = document.createElement("script");
  Object.assign(script, {src: ORT + "ort.wasm.min.js", integrity: HASHES["ort.wasm.min.js"], crossOrigin: "anonymous"});
  const [glue, wasm] = await Promise.all([
    pinned("ort-wasm-simd-threaded.mjs").then(answer => answer.blob()),
    pinned("ort-wasm-simd-threaded.wasm").then(answer => answer.arrayBuffer()),
    new Promise((done, failed) => {
      script.onload = done;
      script.onerror = () => failed(new Error(`nothing of that hash at ${script.src}`));
      document.head.append(script);
    })]);
  const mjs = URL.createObjectURL(new Blob([glue], {type: "text/javascript"}));
  Object.assign(window.ort.env.wasm, {numThreads: 1, wasmBinary: wasm, wasmPaths: {mjs}});
  return window.ort;
};
const open = async model => {
  if (typeof WebAssembly !== "object") throw new Error("this browser has no WebAssembly, which runs the model");
  const kept = window.annotatedModels ??= {};
  const [ort, bytes, file] = await Promise.all([
    kept.runtime ??= runtime(), got(`${model}.onnx`).then(answer => answer.arrayBuffer()), got(`${model}.json`).then(answer => answer.json())]);
  const session = await ort.InferenceSession.create(new Uint8Array(bytes), {executionProviders: ["wasm"]});
  const sizes = list => Array.isArray(list) ? [list.length, ...sizes(list[0])] : [];
  const whole = list => new ort.Tensor("int32", Int32Array.from(list.flat(Infinity)), sizes(list));
  const each = (all, does) => Object.fromEntries(Object.entries(all).map(([name, one]) => [name, does(one)]));
  return {file, run: async inputs => each(await session.run(each(inputs, whole)), ({data, dims}) => nest(data, dims))};
};
const connect = model => {
  const kept = window.annotatedModels ??= {};
  return kept[model] ??= open(model).catch(error => { delete kept[model]; delete kept.runtime; throw error; });
};
