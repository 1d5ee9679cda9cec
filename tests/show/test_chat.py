"Conversations: read once, equal to reading anew; stopped, forgotten, refused; and the widget in a browser."

import re

import pytest
import torch
from messages import says

from annotated_nlp.llama import Llama, LlamaConfig
from annotated_nlp.show import chat
from annotated_nlp.show.chat import Chat, chat_widget
from annotated_nlp.tokenization import load

TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
QUESTIONS = ("a quiet film about two brothers", "and the end?", "would you watch it again")


@pytest.fixture(scope="module")
def tokenizer():
    made = load("annotated-nlp/reviews-gpt")
    made.template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    made = Llama(LlamaConfig(vocab_size=tokenizer.get_vocab_size(), max_len=400, d_model=32, n_heads=4, n_kv_heads=2, d_ff=64, n_layers=2, eos_id=0)).eval()
    for weights in made.parameters():  # far from uniform, so that answers differ
        weights.data.mul_(6 if weights.dim() > 1 else 1)
    return made


def whole(model, tokenizer, messages, new):
    "The answer by `generate`, which reads the conversation from its beginning."
    text = "".join(f"[{m['role']}] {m['content']}\n" for m in messages) + "[assistant]"
    written = model.generate(torch.tensor([tokenizer.encode(text).ids]), new)[0].tolist()
    return tokenizer.decode(written[: written.index(0)] if 0 in written else written).rstrip("\ufffd")


@pytest.mark.parametrize("system", [None, "be brief"])
def test_each_answer_is_that_of_the_whole_text(model, tokenizer, system, monkeypatch):
    "Over three turns, one of them stopped; and of what was read before, nothing is read again."
    talk, read = Chat(model, tokenizer, system), []
    before = type(model).read
    monkeypatch.setattr(type(model), "read", lambda self, ids, state: read.append(ids.shape[1]) or before(self, ids, state))
    for turn, question in enumerate(QUESTIONS):
        asked = [*talk.messages, dict(role="user", content=question)]
        parts = []
        read.clear()
        known = len(talk.known)
        for part in talk.ask(question, max_new_tokens=12):
            parts.append(part)
            if turn == 1 and len(parts) == 3:
                break
        answer = whole(model, tokenizer, asked, 12)
        assert talk.messages == [*asked, dict(role="assistant", content="".join(parts))]
        assert answer.startswith("".join(parts)) if turn == 1 else answer == "".join(parts)
        assert turn == 0 or read[0] <= len(talk.ids(asked)) - known + 12 < len(talk.ids(asked))


def test_drawn_as_by_generate(model, tokenizer):
    "Same distribution: over many first tokens, shares are those of `filter_logits`' softmax."
    ids = Chat(model, tokenizer).ids([dict(role="user", content=QUESTIONS[0])])
    with torch.no_grad():
        logits = model(torch.tensor([ids]))[0, -1]
    shares = (logits / 0.1).softmax(-1)
    draws = chat._drawn(logits.expand(4000, -1), dict(temperature=0.1, top_p=None), torch.Generator().manual_seed(0))
    best = shares.topk(3).indices
    found = torch.stack([(draws == i).float().mean() for i in best])
    assert torch.all((found - shares[best]).abs() < 4 * (shares[best] / 4000).sqrt()) and shares[best[0]] > 0.05
    cuts = dict(max_new_tokens=12, temperature=0.5, top_p=0.9)
    texts = ["".join(Chat(model, tokenizer).ask(QUESTIONS[0], **cuts, generator=torch.Generator().manual_seed(seed))) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_characters_come_whole(model, tokenizer, monkeypatch):
    "A character of several bytes is not shown before its last byte is written."
    text = "na\u00efve \u2014 \U0001f600!"
    pieces = iter(tokenizer.encode(text).ids + [0])
    monkeypatch.setattr(chat, "_drawn", lambda *_: torch.tensor([next(pieces)]))
    parts = [*Chat(model, tokenizer).ask("say it", max_new_tokens=60)]
    assert "".join(parts) == tokenizer.decode(tokenizer.encode(text).ids) and not any("\ufffd" in part for part in parts)
    assert len(tokenizer.encode("\U0001f600").ids) > 1


def test_what_has_no_room_is_forgotten(model, tokenizer):
    "The oldest question goes with its answer, the system prompt stays; and the answer is that of what is left."
    talk = Chat(model, tokenizer, "be brief", room=60)
    for question in QUESTIONS * 2:
        "".join(talk.ask(question, max_new_tokens=12))
        kept = talk.messages[:-1]
        assert [m["role"] for m in kept] == ["system", *("user assistant " * 9).split()][: len(kept)] and len(talk.ids(kept)) + 12 <= 60
        assert kept[-1]["content"] == question and talk.messages[-1]["content"] == whole(model, tokenizer, kept, 12)
    assert len(talk.messages) < 12
    before = [*talk.messages]
    with pytest.raises(ValueError, match=says("room=60", "shorten")):
        talk.ask("a very long question " * 20, max_new_tokens=12)
    with pytest.raises(ValueError, match=says("top_p", "temperature")):
        talk.ask("why?", top_p=0.9)
    with pytest.raises(ValueError, match="texts is empty; give at least one character"):
        talk.ask("")
    assert talk.messages == before
    talk.forget()
    assert talk.messages == before[:1]
    "".join(talk.ask(QUESTIONS[0], max_new_tokens=12))
    assert talk.messages[-1]["content"] == whole(model, tokenizer, talk.messages[:-1], 12)


def test_without_a_template(model):
    with pytest.raises(ValueError, match=says("no template", "smollm2")):
        Chat(model, load("annotated-nlp/reviews-gpt"))


def test_a_template_reaches_nothing_but_the_messages(model):
    made = load("annotated-nlp/reviews-gpt")
    made.template = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(Exception, match="unsafe"):
        Chat(model, made).ask("hello")


def test_as_html(model, tokenizer):
    talk = Chat(model, tokenizer, "<b>&")
    assert "&lt;b&gt;&amp;" in talk._repr_html_() and "<b>system</b>" in talk._repr_html_()


CHANNEL = """async esm => { const heard = [], model = {on: (_, listen) => heard.push(listen), send: content => window.python(content)};
    window.told = content => heard.forEach(listen => listen(content));
    const {default: {render}} = await import(URL.createObjectURL(new Blob([esm], {type: "text/javascript"})));
    render({model, el: document.querySelector("main")}) }"""


@pytest.mark.browser
def test_widget(browser, model, tokenizer):
    "A question by keyboard is answered in parts, a long answer is stopped, an error keeps the question, and a new conversation is empty."
    talk, out = Chat(model, tokenizer, room=400), []
    widget = chat_widget(talk, max_new_tokens=300)
    widget.send = lambda content, buffers=None: out.append(content)
    page = browser.new_page()
    page.set_content("<main></main>")
    page.expose_function("python", lambda content: widget._handle_custom_msg(content, []))
    page.evaluate(CHANNEL, widget._esm)
    status = page.locator("[role=status]")

    def until(found):
        "Pass on what Python sent until the status says it."
        for _ in range(600):
            while out:
                page.evaluate("content => window.told(content)", out.pop(0))
            if re.search(found, status.inner_text()):
                return
            page.wait_for_timeout(50)
        pytest.fail(f"{found} was never said: {status.inner_text()}")

    until("^$")  # what was said before has come
    stop = page.get_by_role("button", name="Stop")
    assert stop.get_attribute("aria-disabled") == "true"
    box = page.get_by_role("textbox")
    box.fill("how was the film?")
    box.press("Enter")
    until("Writing")
    assert stop.get_attribute("aria-disabled") == "false" and box.input_value() == ""
    stop.click()
    until("Stopped after|Answered in")
    assert page.locator(".user").all_inner_texts() == ["how was the film?"]
    assert page.locator(".assistant").evaluate("made => made.textContent") == talk.messages[-1]["content"] != ""
    before = [*talk.messages]
    box.fill("too long " * 200)
    page.get_by_role("button", name="Send").click()
    until("more than room=400")
    assert box.input_value() == ("too long " * 200).strip() and page.locator(".user").count() == 1 and talk.messages == before
    page.get_by_role("button", name="New conversation").click()
    page.wait_for_timeout(50)
    until("^$")
    assert page.locator(".log > div").count() == 0 and talk.messages == []
    page.close()
