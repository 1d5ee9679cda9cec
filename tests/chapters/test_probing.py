"Probing: scikit-learn's optimum, codes by definition, transformers' attention, cut heads and half-finished states; and what must not matter."

import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from messages import says
from parity import close, lengths, loud
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from torch.testing import assert_close

import test_invariants
from annotated_nlp import probing
from annotated_nlp.attention import attention_maps
from annotated_nlp.bert import Bert, BertConfig, BertForMaskedLM
from annotated_nlp.gpt import GPT, GPTConfig
from annotated_nlp.probing import Span, attention_share, control_labels, cut, fit_probes
from annotated_nlp.probing import lens, online_code, patterns, preferences, read
from annotated_nlp.probing import word_span
from annotated_nlp.t5 import T5, T5Config

unchecked = test_invariants.unchecked
SIZES = dict(vocab_size=40, d_model=24, n_heads=3, n_layers=2, max_len=32, dropout=0.0)
REAL = lengths(7, 4, 6)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def masked_lm(tmp_path_factory):
    "Ours, and transformers' model with the same weights."
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("bert")
    ours = loud(BertForMaskedLM(BertConfig(**SIZES)))
    ours.save_pretrained(folder)
    return ours, transformers.BertForMaskedLM.from_pretrained(folder, attn_implementation="eager").eval()


def items(layers=2, n=120, d=6, classes=3):
    "Features of which the first says something of the labels, each layer on another scale."
    y = torch.randint(classes, (n,))
    x = torch.randn(layers, n, d, dtype=torch.double)
    x[..., 0] += y
    return x * torch.tensor([1.0, 100.0])[:layers, None, None] + 5, y


# reading ---------------------------------------------------------------------------------------------------------------


def test_reads_as_one_row_after_the_other(masked_lm):
    "Rows of different lengths in batches, spans in any order, several in a row, against a row at a time."
    model = masked_lm[0].trunk
    rows = [torch.randint(40, (n,)).tolist() for n in (7, 3, 5, 7, 1)]
    spans = [Span(3, 2, 5), Span(0, 0, 7), Span(4, 0, 1), Span(3, 0, 1), Span(1, 1, 3), Span(0, 6, 7)]
    with torch.no_grad():
        alone = [torch.stack(model.states(torch.tensor([row]), all_layers=True))[:, 0] for row in rows]
    wanted = torch.stack([alone[i][:, a:b].mean(1) for i, a, b in spans], 1)
    for size in (1, 2, 64):
        found = read(lambda ids, mask: model.states(ids, mask=mask, all_layers=True), rows, spans, size=size, pad_id=39)
        assert found.shape == (3, 6, 24) and not found.requires_grad
        close(found, wanted)


@pytest.mark.parametrize("span", [(0, 2, 4), (0, 1, 1), (1, 0, 1), (-1, 0, 1), (0, -1, 1)])
def test_spans_that_no_row_has(span):
    with pytest.raises(ValueError, match=says("spans has", str(span[0]))):
        read(lambda ids, mask: [ids[..., None].float()], [[1, 2, 3]], [Span(*span)])


def test_word_spans():
    "Pieces that share characters with the word, whatever else they hold; empty ones are markers."
    offsets = [(0, 0), (0, 3), (3, 6), (6, 9), (0, 0)]
    assert word_span(4, offsets, 4, 7) == (4, 2, 4) and word_span(4, offsets, 0, 3) == (4, 1, 2)
    with pytest.raises(ValueError, match=says("row 4", "9", "12")):
        word_span(4, offsets, 9, 12)


# probes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [0.5, 10.0])
def test_probes_are_those_of_scikit_learn(penalty):
    "Every layer and set of labels by itself: coefficients, probabilities, predictions."
    x, y = items()
    labels = torch.stack([y, y[torch.randperm(len(y))]])
    fitted = fit_probes(x, labels, 3, penalty=penalty, steps=2000)
    for t in range(2):
        for layer in range(2):
            scaled = StandardScaler().fit(x[layer].numpy())
            theirs = LogisticRegression(C=1 / penalty, tol=1e-10, max_iter=10_000).fit(scaled.transform(x[layer].numpy()), labels[t])
            assert_close(fitted.weight[t, layer].T, torch.tensor(theirs.coef_), atol=2e-4, rtol=0)
            probabilities = torch.tensor(theirs.predict_proba(scaled.transform(x[layer].numpy())))
            assert_close(fitted.logits(x)[t, layer].softmax(-1), probabilities, atol=1e-4, rtol=0)
            assert fitted.right(x, labels)[t, layer].tolist() == (theirs.predict(scaled.transform(x[layer].numpy())) == labels[t].numpy()).tolist()


def test_probes_together_or_alone():
    "A probe doesn't depend on those that are fitted beside it."
    x, y = items()
    labels = torch.stack([y, 2 - y])
    both = fit_probes(x, labels, 3, steps=1000)
    for t in range(2):
        one = fit_probes(x[1:], labels[t : t + 1], 3, steps=1000)
        assert_close(both.logits(x)[t, 1], one.logits(x[1:])[0, 0], atol=1e-3, rtol=0)
    assert_close(both.logits(x)[0], both.logits(x)[1].flip(-1), atol=1e-3, rtol=0)


def test_gradient_is_zero_at_the_optimum():
    x, y = items()
    fitted = fit_probes(x, y[None], 3, penalty=2.0, steps=2000)
    weight = fitted.weight.clone().requires_grad_()
    logits = fitted._replace(weight=weight).logits(x)[0]
    loss = sum(F.cross_entropy(of, y, reduction="sum") for of in logits) + weight.square().sum()
    assert torch.autograd.grad(loss, weight)[0].abs().max() < 1e-2 * len(y) ** 0.5


@pytest.mark.parametrize("labels", [[[0, 1, 3]], [[0, -1, 1]], [[0, 1]]])
def test_labels_that_are_none(labels, unchecked):
    with pytest.raises(ValueError, match=says("labels must be 3 numbers from 0 to 2")):
        fit_probes(torch.randn(1, 3, 2), torch.tensor(labels), 3)


def test_a_feature_that_never_changes():
    "It says nothing and spoils nothing, in training and beside it."
    x, y = items(layers=1)
    x[..., 2] = 7.0
    fitted = fit_probes(x, y[None], 3)
    assert fitted.logits(x).isfinite().all() and fitted.right(x, y[None]).float().mean() > 0.5


# controls --------------------------------------------------------------------------------------------------------------


def test_control_labels_are_the_things_own():
    "One label for a thing wherever it is, drawn in proportion; another seed draws others; the same seed the same."
    things = [f"w{i % 2000}" for i in range(6000)]
    labels = torch.tensor([0, 0, 0, 1]).repeat(1500)
    found = control_labels(things, labels, [0, 1])
    assert found.shape == (2, 6000) and (found[:, :2000] == found[:, 2000:4000]).all() and (found[:, :2000] == found[:, 4000:]).all()
    assert abs(found.float().mean() - 0.25) < 0.03 and not torch.equal(found[0], found[1])
    assert torch.equal(control_labels(things, labels, [1])[0], found[1])
    agreement = (found[0, :2000] == labels[:2000]).float().mean().item()
    assert abs(agreement - (0.75**2 + 0.25**2)) < 0.05, "independent of the real labels"
    with pytest.raises(ValueError, match=says("things has 1", "labels 2")):
        control_labels(["a"], torch.tensor([0, 1]), [0])


# codes -----------------------------------------------------------------------------------------------------------------


def test_code_of_labels_without_features_counts():
    "Closed form: a probe of nothing gives the shares of what it has seen."
    y = torch.tensor([0, 1, 0, 0, 2, 0, 1, 0, 0, 0, 0, 2])
    found = online_code(torch.zeros(1, 12, 2, dtype=torch.double), y[None], 3, portions=[5 / 12, 8 / 12])
    wanted = 5 * math.log2(3)
    for end, after in ((5, 8), (8, 12)):
        wanted -= sum(math.log2((y[:end] == label).double().mean().item()) for label in y[end:after])
    assert_close(found.item(), wanted, atol=1e-3, rtol=0)


def test_code_by_its_definition():
    x, y = items(n=200)
    found = online_code(x, y[None], 3, portions=[0.2, 0.5], penalty=4.0)
    for layer in range(2):
        wanted, of = 40 * math.log2(3), x[layer].numpy()
        for end, after in ((40, 100), (100, 200)):
            scaled = StandardScaler().fit(of[:end])
            theirs = LogisticRegression(C=1 / 4, tol=1e-10, max_iter=10_000).fit(scaled.transform(of[:end]), y[:end])
            wanted -= theirs.predict_log_proba(scaled.transform(of[end:after]))[range(after - end), y[end:after]].sum() / math.log(2)
        assert abs(found[0, layer].item() / wanted - 1) < 1e-3


def test_code_is_short_where_features_know():
    x, y = items(n=400)
    x[0, :, 0] += 20 * y
    known, hidden = online_code(x, torch.stack([y, y[torch.randperm(400)]]), 3)[:, 0] / 400
    assert known < 1.1 and hidden > math.log2(3)


@pytest.mark.parametrize("portions", [[0.5, 0.5], [0.6, 0.2], [0.0, 0.5], [0.5, 1.0], [0.001]])
def test_portions_must_rise(portions):
    with pytest.raises(ValueError, match=says("portions=", "must rise")):
        online_code(torch.randn(1, 20, 2), torch.zeros(1, 20, dtype=torch.long), 2, portions=portions)


# heads -----------------------------------------------------------------------------------------------------------------


def test_patterns_by_their_words():
    "Each pair by brute force."
    ids = torch.randint(5, (3, 7))
    found = patterns(ids, REAL, marks=[2, 4])
    rules = {
        "itself": lambda i, q, k: q == k,
        "previous": lambda i, q, k: k == q - 1,
        "next": lambda i, q, k: k == q + 1,
        "marks": lambda i, q, k: ids[i, k].item() in (2, 4),
        "same piece": lambda i, q, k: q != k and ids[i, q] == ids[i, k],
    }
    assert found.keys() == rules.keys()
    for name, rule in rules.items():
        for i in range(3):
            for q in range(7):
                for k in range(7):
                    assert found[name][i, q, k] == bool(rule(i, q, k) and REAL[i, q] and REAL[i, k]), (name, i, q, k)
    assert not patterns(ids, REAL)["marks"].any()


def test_share_is_that_of_transformers_maps(masked_lm):
    ours, theirs = masked_lm
    ids = torch.randint(40, (3, 7))
    with torch.no_grad(), attention_maps(ours) as maps:
        ours(ids, mask=REAL)
        attentions = theirs(ids, attention_mask=REAL.long(), output_attentions=True).attentions
    for pairs in patterns(ids, REAL, marks=[3, 5, 7]).values():
        for weights, other in zip(maps.values(), attentions, strict=True):
            of = [other[i, :, q][:, pairs[i, q]].sum(-1) for i in range(3) for q in range(7) if pairs[i, q].any()]
            if of:
                assert_close(attention_share(weights, pairs), torch.stack(of).mean(0), atol=1e-5, rtol=1e-4)


def test_share_of_a_pattern_without_pairs():
    with pytest.raises(ValueError, match=says("pattern has no pair")):
        attention_share(torch.rand(1, 2, 3, 3), torch.zeros(1, 3, 3, dtype=torch.bool))


def test_cut_heads_are_columns_of_transformers_matrix(masked_lm, tmp_path):
    "Outputs with heads cut, in both layers, and none left behind; in training too."
    ours, _ = masked_lm
    ours.save_pretrained(tmp_path)
    theirs = transformers.BertForMaskedLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    ids, heads = torch.randint(40, (3, 7)), {"trunk.stack.blocks.0.attention.layer": [0, 2], "trunk.stack.blocks.1.attention.layer": (1,)}
    before = ours(ids, mask=REAL)
    with torch.no_grad():
        for layer, numbers in enumerate(heads.values()):
            for k in numbers:
                theirs.bert.encoder.layer[layer].attention.output.dense.weight[:, 8 * k : 8 * k + 8] = 0
    wanted = theirs(ids, attention_mask=REAL.long()).logits
    with cut(ours, heads):
        found = ours(ids, mask=REAL)
        close(found[REAL], wanted[REAL])
        with torch.no_grad(), attention_maps(ours) as maps:  # the way by hand is cut too, its weights are as ever
            close(ours(ids, mask=REAL)[REAL], wanted[REAL].detach())
    assert (found - before)[REAL].abs().max() > 0.1 and len(maps) == 2
    assert torch.equal(ours(ids, mask=REAL), before)


def test_cut_all_heads_leaves_the_bias():
    model = loud(GPT(GPTConfig(**SIZES)))
    layer = model.stack.blocks[0].attention.layer
    with cut(model, {"stack.blocks.0.attention.layer": range(3)}), torch.no_grad():
        assert_close(layer(torch.randn(2, 5, 24)), layer.out.bias.expand(2, 5, 24).detach())


def test_cut_cross_attention():
    model = loud(T5(T5Config(vocab_size=40, d_model=24, n_heads=3, d_head=8, d_ff=32, n_layers=2, dropout=0.0)))
    [name] = [name for name, _ in model.named_modules() if name.endswith("blocks.1.cross.layer")]
    src, tgt = torch.randint(40, (2, 6)), torch.randint(40, (2, 5))
    with cut(model, {name: [1]}):
        without = model(src, tgt)
    assert (without - model(src, tgt)).abs().max() > 1e-3


@pytest.mark.parametrize("heads,words", [({"stack": [0]}, "'stack'"), ({"nowhere": [0]}, "'nowhere'"), ({"stack.blocks.0.attention.layer": [3]}, "0 to 2"),
                                         ({"stack.blocks.0.attention.layer": [-1]}, "0 to 2")])
def test_heads_that_are_none(heads, words):
    model = Bert(BertConfig(**SIZES), pooler=False).eval()
    ids = torch.randint(40, (1, 4))
    before = model(ids)
    with pytest.raises(ValueError, match=says("heads", words)):
        with cut(model, {"stack.blocks.1.attention.layer": [0], **heads}):
            pass
    assert torch.equal(model(ids), before), "what was cut before the refusal is whole again"


# lens and gaps ---------------------------------------------------------------------------------------------------------


def test_lens_on_bert(masked_lm):
    ours, theirs = masked_lm
    ids = torch.randint(40, (3, 7))
    with torch.no_grad():
        hidden = theirs(ids, attention_mask=REAL.long(), output_hidden_states=True).hidden_states
        layers = ours.trunk.states(ids, mask=REAL, all_layers=True)
        found = lens(torch.stack(layers)[:, REAL], ours.pieces)
        for layer, state in zip(found, hidden, strict=True):
            close(layer, theirs.cls(state)[REAL])


def test_lens_on_gpt(tmp_path):
    "Pre-norm: the last norm for all layers but the last, which has had it."
    ours = loud(GPT(GPTConfig(**SIZES)))
    ours.save_pretrained(tmp_path)
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    ids = torch.randint(40, (3, 7))
    with torch.no_grad():
        found = lens(torch.stack(ours.states(ids, all_layers=True)).flatten(1, 2), ours.logits, ours.stack.norm)
        hidden = theirs(ids, output_hidden_states=True).hidden_states
        for layer, state in zip(found[:-1], hidden):
            close(layer, theirs.lm_head(theirs.transformer.ln_f(state)).flatten(0, 1), 1e-4)
        close(found[-1], theirs(ids).logits.flatten(0, 1), 1e-4)


def test_preferences_by_hand():
    logits, options = torch.randn(2, 5), torch.tensor([[3, 0], [1, 1]])
    plain = preferences(logits, options)
    for row in range(2):
        for k in range(2):
            share = logits[row].exp()[options[row, k]] / logits[row].exp().sum()
            assert_close(plain[row, k], share.log())
    assert_close(preferences(logits, options, logits), torch.zeros(2, 2))
    empty = torch.randn(1, 5)
    assert_close(preferences(logits, options, empty), plain - preferences(empty.expand(2, 5), options))


def test_all_is_exported():
    assert {"Probes", "PORTIONS", "read", "cut", "lens"} <= set(probing.__all__)
