// A conversation, by anywidget: what is asked goes to Python, and the answer comes back in parts. Before it stand `style` and the
// helpers of common.js, after it `make`.
export default {render({model, el}) {
  const log = make("div", {class: "log", role: "log", "aria-label": "conversation", tabindex: "0"});
  const box = make("textarea", {rows: "2", "aria-label": "your message", placeholder: "Write a message. Enter sends it, Shift + Enter begins a line."});
  const heat = make("input", {type: "range", min: "0", max: "1.5", step: "0.1", value: "0.2"}), shown = make("output", {}, "0.2");
  const said = make("p", {role: "status"});
  let answer, busy = false;
  const add = (role, content) => {
    const made = make("div", {class: role}, content);
    log.append(made);
    log.scrollTop = log.scrollHeight;
    return made;
  };
  const state = now => {
    busy = now;
    for (const [button, off] of [[send, now], [fresh, now], [stop, !now]]) button.setAttribute("aria-disabled", off);
  };
  const ask = () => {
    const text = box.value.trim();
    if (busy || !text) return;
    add("user", text);
    answer = add("assistant", "");
    box.value = "";
    state(true);
    said.textContent = "Reading \u2026";
    model.send({ask: text, temperature: Number(heat.value)});
  };
  const send = press("Send", ask), stop = press("Stop", () => model.send({stop: true})), fresh = press("New conversation", () => model.send({fresh: true}));
  heat.addEventListener("input", () => { shown.textContent = Number(heat.value).toFixed(1); });
  box.addEventListener("keydown", event => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    ask();
  });
  const hears = {
    messages: all => { log.replaceChildren(); for (const {role, content} of all) add(role, content); said.textContent = ""; },
    part: text => { answer ??= add("assistant", ""); answer.append(text); said.textContent = "Writing \u2026"; log.scrollTop = log.scrollHeight; },
    end: text => { answer = null; said.textContent = text; state(false); },
    error: text => { if (answer && !answer.textContent) { box.value = answer.previousSibling.textContent; answer.previousSibling.remove(); answer.remove(); } answer = null; said.textContent = text; state(false); },
  };
  model.on("msg:custom", heard => { for (const [name, content] of Object.entries(heard)) hears[name](content); });
  const host = make("div", {"data-lm-suppress-shortcuts": "true", role: "group", "aria-label": "conversation with a language model"});
  const root = host.attachShadow({mode: "open"});
  root.append(make("style", {}, style), log, box, make("div", {class: "tools"}, send, stop, fresh, make("label", {}, make("span", {}, "temperature ", shown), heat)), said);
  state(false);
  el.append(host);
  model.send({messages: true});
}};
