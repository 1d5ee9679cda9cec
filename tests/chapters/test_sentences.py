"Sentence vectors: losses against loops and PyTorch's cross-entropy, decoders against the paper's equations, neighbours against scikit-learn."

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from messages import says
from sklearn.metrics.pairwise import cosine_similarity
from sklearn.neighbors import NearestNeighbors
from torch.testing import assert_close

from annotated_nlp import sentences, tokenization
from annotated_nlp.bert import Bert, BertConfig
from annotated_nlp.data import pad
from annotated_nlp.sentences import Paragraph, Pooled, Search, SentenceEncoder
from annotated_nlp.sentences import SkipThought, contrastive_loss, encode, found
from annotated_nlp.sentences import learn_halves, nearest, open_search, paragraphs, pool
from annotated_nlp.sentences import quick_thought_loss, skip_thought_loss, triples
from tools import paragraphs as written

ROOT = Path(__file__).resolve().parents[2]


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


def small_bert(**changes):
    torch.manual_seed(0)
    return Bert(BertConfig(**dict(vocab_size=40, d_model=12, n_heads=2, d_ff=20, n_layers=3, max_len=20, dropout=0.1) | changes), pooler=False).eval()


ROWS = [[5, 6, 7, 8], [9], [5, 6], [3, 4, 5, 6, 7, 8, 9]]


# pooling --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how,of", [("mean", lambda x: x.mean(0)), ("max", lambda x: x.amax(0)), ("cls", lambda x: x[0])])
def test_pools_are_those_of_each_row_alone(how, of):
    states, mask = drawn(4, 6, 3), torch.tensor([[1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1], [0, 0, 1, 0, 1, 0]]).bool()
    states[~mask] = torch.nan
    assert_close(pool(states, mask, how), torch.stack([of(row[real]) for row, real in zip(states, mask)]))


@pytest.mark.parametrize("how", ["mean", "max", "cls"])
def test_a_row_without_tokens_gives_zeros(how):
    assert not pool(drawn(2, 3, 4), torch.zeros(2, 3, dtype=torch.bool), how).any()


def test_pool_refuses_another_way(unchecked):
    with pytest.raises(ValueError, match="how.*median.*mean"):
        pool(drawn(2, 3, 4), torch.ones(2, 3, dtype=torch.bool), "median")
    with pytest.raises(ValueError, match="how.*last"):
        Pooled(small_bert(), "last")
    with pytest.raises(ValueError, match=says("layer=4", "0 to 3")):
        Pooled(small_bert(), layer=4)


@pytest.mark.parametrize("layer", [0, 2, 3, -1])
def test_pooled_reads_one_layer(layer):
    bert, (ids, mask) = small_bert(), pad(ROWS)
    states = bert.states(ids, mask=mask, all_layers=True)[layer]
    assert_close(Pooled(bert, layer=layer)(ids, mask), torch.stack([row[real].mean(0) for row, real in zip(states, mask)]))


def test_encode_gives_each_row_as_alone_and_in_its_place():
    encoder = Pooled(small_bert())
    alone = torch.stack([encoder(torch.tensor([row]), torch.ones(1, len(row), dtype=torch.bool))[0] for row in ROWS]).detach()
    for size in (1, 3, 64):
        assert_close(encode(encoder.train(), ROWS, size=size), alone, atol=1e-5, rtol=1e-5)
    assert not encoder.training
    with pytest.raises(ValueError):
        encode(encoder, [])


# nearest --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 4, 30])
def test_nearest_is_scikit_learns(k):
    queries, keys = drawn(12, 5), drawn(30, 5, seed=1)
    distances, wanted = NearestNeighbors(n_neighbors=k, metric="cosine", algorithm="brute").fit(keys.numpy()).kneighbors(queries.numpy())
    cosines, rows = nearest(queries, keys, k)
    assert_close(rows, torch.from_numpy(wanted))
    assert_close(cosines, 1 - torch.from_numpy(distances))


def test_found_counts_own_rows():
    queries = drawn(30, 4)
    keys = queries + 0.8 * drawn(30, 4, seed=2)
    similar = cosine_similarity(queries.numpy(), keys.numpy())
    rank = (similar > np.diag(similar)[:, None]).sum(1)
    for k in (1, 5):
        assert found(queries, keys, k).tolist() == (rank < k).tolist()
    assert found(queries, keys, 30).all() and 0 < found(queries, keys).sum() < 30


def test_nearest_refuses(unchecked):
    with pytest.raises(ValueError, match=says("k=4", "3 keys")):
        nearest(drawn(2, 5), drawn(3, 5), 4)
    with pytest.raises(ValueError, match=says("keys", "shape")):
        found(drawn(2, 5), drawn(3, 5))


# skip-thought ---------------------------------------------------------------------------------------------------------


def test_decoder_is_the_papers():
    "Kiros et al. 2015, equations 5 to 9, with PyTorch's reset gate (behind the recurrent product)."
    torch.manual_seed(0)
    model = SkipThought(SentenceEncoder(20, 6, 8), 20, 5).double()
    z, words = drawn(3, 8), torch.tensor([[1, 4, 7], [1, 2, 3], [1, 9, 9]])
    for side in ("before", "after"):
        gru, h, logits = model.decoders[side], torch.zeros(3, 5, dtype=torch.double), []
        gates = lambda weight: weight.split(5)
        (W, C), U = zip(*[part.split([5, 8], 1) for part in gates(gru.weight_ih_l0)]), gates(gru.weight_hh_l0)
        given, kept = gates(gru.bias_ih_l0), gates(gru.bias_hh_l0)
        for t in range(3):
            x = model.embedding.weight[words[:, t]]
            parts = [x @ W[i].T + z @ C[i].T + given[i] for i in range(3)]
            again = [h @ U[i].T + kept[i] for i in range(3)]
            r, update = (parts[0] + again[0]).sigmoid(), (parts[1] + again[1]).sigmoid()
            new = (parts[2] + r * again[2]).tanh()
            h = (1 - update) * new + update * h
            logits.append(h @ model.head.weight.T + model.head.bias)
        assert_close(model.write(side, z, words), torch.stack(logits, 1))


@pytest.mark.parametrize("bidirectional", [True, False])
def test_encoder_is_pytorchs_gru(bidirectional):
    torch.manual_seed(0)
    encoder = SentenceEncoder(20, 6, 8, bidirectional=bidirectional).double()
    ids, mask = pad(ROWS)
    given = encoder(ids, mask)
    for row, vector in zip(ROWS, given):
        parts = []
        for layer, order in zip(encoder.rnn.layers[0], (1, -1)):
            parts.append(layer(encoder.embedding(torch.tensor([row[::order]])))[0][0, -1])
        assert_close(vector, torch.cat(parts))


def test_loss_is_the_mean_of_both_sides():
    torch.manual_seed(0)
    model = SkipThought(SentenceEncoder(20, 6, 8), 20, 5).double()
    sentence, before, after = pad([[4, 5], [6, 7, 8]]), pad([[1, 3, 2], [1, 9, 9, 9, 2]]), pad([[1, 5, 5, 2], [1, 2]])
    sides = []
    for index, (ids, mask) in enumerate((before, after)):
        logits = model(*sentence, before[0][:, :-1], after[0][:, :-1])[index]
        sides.append(F.cross_entropy(logits[mask[:, 1:]], ids[:, 1:][mask[:, 1:]]))
    assert_close(skip_thought_loss(model, sentence, before, after), sum(sides) / 2)


def test_padding_of_a_neighbour_changes_nothing():
    torch.manual_seed(0)
    model = SkipThought(SentenceEncoder(20, 6), 20, 5)
    rows = [[1, 3, 2], [1, 9, 9, 2]]
    plain = skip_thought_loss(model, pad(ROWS[:2]), pad(rows), pad(rows))
    assert_close(skip_thought_loss(model, pad(ROWS[:2], length=9), pad(rows, 7, length=9), pad(rows, length=8)), plain)


def test_the_sentence_can_be_learned_from_its_neighbours():
    "The two neighbours say which of two sentences it was: only through z can both decoders know."
    torch.manual_seed(0)
    model = SkipThought(SentenceEncoder(12, 8), 12, 8)
    sentence, side = pad([[3, 4], [5, 6]]), pad([[1, 7, 7, 2], [1, 8, 9, 2]])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(120):
        loss = skip_thought_loss(model, sentence, side, side)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05 < skip_thought_loss(model, (sentence[0].flip(0), sentence[1]), side, side)


def test_triples_stay_within_documents():
    documents = [[[1], [2], [3], [4]], [[5], [6]], [[7], [8], [9]]]
    assert triples(documents) == [([1], [2], [3]), ([2], [3], [4]), ([7], [8], [9])]
    with pytest.raises(ValueError, match=says("three sentences")):
        triples([[[1], [2]]])


def test_models_refuse(unchecked):
    with pytest.raises(ValueError, match=says("d_out", or_else="even")):
        SentenceEncoder(20, 6, 7)
    with pytest.raises(ValueError, match="pad_id=20"):
        SentenceEncoder(20, 6, pad_id=20)
    model, (ids, mask) = SkipThought(SentenceEncoder(20, 6), 20, 5), pad(ROWS)
    with pytest.raises(ValueError, match="after"):
        model(ids, mask, ids, ids[:2])
    with pytest.raises(ValueError, match="before"):
        model(ids, mask, ids + 20, ids)


# quick-thought --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("documents", [None, [0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 1, 2]])
def test_quick_thought_is_a_classification_of_each_neighbour(documents):
    f, g = drawn(6, 4), drawn(6, 4, seed=1)
    of = documents or [0] * 6
    rows = []
    for i in range(6):
        others = [j for j in range(6) if j != i]
        beside = [others.index(j) for j in (i - 1, i + 1) if 0 <= j < 6 and of[j] == of[i]]
        scores = torch.stack([f[i] @ g[j] for j in others])
        if beside:
            rows.append(sum(F.cross_entropy(scores, torch.tensor(j)) for j in beside) / len(beside))
    given = quick_thought_loss(f, g, None if documents is None else torch.tensor(documents))
    assert_close(given, sum(rows) / len(rows))


def test_quick_thought_of_equal_vectors_is_chance():
    assert_close(quick_thought_loss(torch.ones(9, 4), torch.ones(9, 4)), torch.tensor(math.log(8)))


def test_gradients_are_finite():
    f = drawn(5, 4).requires_grad_()
    quick_thought_loss(f, drawn(5, 4, seed=1), torch.tensor([0, 1, 1, 2, 3])).backward()
    assert f.grad.isfinite().all() and f.grad[1:3].any() and not f.grad[[0, 3, 4]].any()


def test_quick_thought_refuses(unchecked):
    with pytest.raises(ValueError, match=says("neighbours", "consecutive")):
        quick_thought_loss(drawn(3, 4), drawn(3, 4), torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match=says("consecutive")):
        quick_thought_loss(drawn(1, 4), drawn(1, 4))
    with pytest.raises(ValueError, match=says("documents", "3 rows")):
        quick_thought_loss(drawn(3, 4), drawn(3, 4), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="candidates"):
        quick_thought_loss(drawn(3, 4), drawn(4, 4))


# contrast -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.05, 1.0])
def test_contrast_is_cross_entropy_of_scikit_learns_cosines(temperature):
    "The formula of sentence-transformers' MultipleNegativesRankingLoss, whose scale is 1 / temperature."
    queries, keys = drawn(7, 5), drawn(7, 5, seed=1)
    scores = torch.from_numpy(cosine_similarity(queries.numpy(), keys.numpy())) / temperature
    assert_close(contrastive_loss(queries, keys, temperature), F.cross_entropy(scores, torch.arange(7)))
    by_hand = -sum(math.log(math.exp(row[i]) / sum(map(math.exp, row))) for i, row in enumerate(scores.tolist())) / 7
    assert contrastive_loss(queries, keys, temperature).item() == pytest.approx(by_hand)


def test_contrast_sees_directions_alone():
    queries, keys = drawn(7, 5), drawn(7, 5, seed=1)
    assert_close(contrastive_loss(3 * queries, keys / 7), contrastive_loss(queries, keys))
    assert_close(contrastive_loss(torch.ones(6, 3), torch.ones(6, 3)), torch.tensor(math.log(6)))


def test_contrast_refuses(unchecked):
    with pytest.raises(ValueError, match="temperature=0"):
        contrastive_loss(drawn(3, 4), drawn(3, 4), 0)
    with pytest.raises(ValueError, match=says("two")):
        contrastive_loss(drawn(1, 4), drawn(1, 4))
    with pytest.raises(ValueError, match="keys"):
        contrastive_loss(drawn(3, 4), drawn(4, 4))


def test_dropout_alone_pulls_and_pushes():
    "Two passes with other dropout are positives: training raises their cosine less that with others."
    encoder, (ids, mask) = Pooled(small_bert()).train(), pad(ROWS)

    def gap():
        torch.manual_seed(1)
        one, other = encoder(ids, mask), encoder(ids, mask)
        assert not torch.equal(one, other)
        cosines = F.normalize(one, dim=1) @ F.normalize(other, dim=1).T
        return (cosines.diagonal().mean() - cosines[~torch.eye(4, dtype=torch.bool)].mean()).item()

    before, optimizer = gap(), torch.optim.Adam(encoder.parameters(), lr=1e-3)
    for _ in range(40):
        loss = contrastive_loss(encoder(ids, mask), encoder(ids, mask))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert gap() > before + 0.2




# the search -----------------------------------------------------------------------------------------------------------

CATS = [
    Paragraph("a", "A", "One", "The cat sat on the mat and slept the whole afternoon."),
    Paragraph("b", "B", "Two", "Divide the loss by the number of tokens before the backward pass."),
    Paragraph("lab/c", "C", "Three", "The film was dull, and its hero could not act at all."),
]


@pytest.fixture(scope="module")
def book():
    return Pooled(Bert.from_pretrained("annotated-nlp/reviews-bert", pooler=False)), tokenization.load("annotated-nlp/reviews-bert")


def test_a_paragraph_is_nearest_to_itself(book):
    search = Search(CATS, *book)
    for one in CATS:
        (cosine, first), *others = search.find(f"{one.heading}. {one.text}", 3)
        assert first == one and cosine == pytest.approx(1, abs=1e-4)
        assert cosine > others[0][0] >= others[1][0]


def test_search_refuses(book):
    with pytest.raises(ValueError, match=says("paragraphs")):
        Search([], *book)
    with pytest.raises(ValueError, match=says("2 rows", "3 paragraphs")):
        Search(CATS, *book, vectors=torch.ones(2, 4))
    search = Search(CATS, *book)
    with pytest.raises(ValueError, match=says("question", "word")):
        search.find("  ")
    with pytest.raises(ValueError, match=says("k=4", "3 keys")):
        search.find("cat", 4)


def test_vectors_are_kept_and_lost_files_are_made_again(tmp_path, monkeypatch, capsys):
    learned = []
    monkeypatch.setattr(sentences, "learn_halves", lambda encoder, rows: learned.append(rows) or torch.nn.init.zeros_(encoder.trunk.embedding.norm.bias))
    first = open_search(CATS, tmp_path, "reviews-bert")
    assert len(learned) == 1 and "first time" in capsys.readouterr().err
    again = open_search(CATS, tmp_path, "reviews-bert")
    assert len(learned) == 1 and capsys.readouterr().err == ""
    assert_close(again.vectors, first.vectors)
    assert again.find("a cat", 1) == first.find("a cat", 1)
    open_search(CATS[:2], tmp_path, "reviews-bert")  # other paragraphs, another file
    assert len(learned) == 2 and len(list(tmp_path.iterdir())) == 2
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:1000])
    assert_close(open_search(CATS, tmp_path, "reviews-bert").vectors, first.vectors)
    assert len(learned) == 3


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sentences, "learn_halves", lambda encoder, rows: None)
    (tmp_path / "file").write_text("")
    assert len(open_search(CATS, tmp_path / "file" / "below", "reviews-bert").vectors) == 3
    assert "can't be kept" in capsys.readouterr().err
    with pytest.raises(ValueError, match="name='bag'"):
        open_search(CATS, tmp_path, "bag")


def test_halves_find_each_other_after_training():
    torch.manual_seed(0)
    rows = [[i, i, i, i, i, i] for i in range(2, 38)]
    losses = learn_halves(Pooled(small_bert()), rows, updates=30, size=8)
    assert np.mean(losses[-5:]) < 0.5 * losses[0]
    with pytest.raises(ValueError, match=says("36 texts", "size")):
        learn_halves(Pooled(small_bert()), rows, size=40)


def test_the_command(monkeypatch, capsys, book):
    monkeypatch.setattr(sentences, "open_search", lambda found: Search(CATS, *book))
    sentences.main("the film was dull and its hero could not act".split() + ["-k", "1"])
    printed = capsys.readouterr().out
    assert "C > Three" in printed and f"{sentences.SITE}/lab/c.html" in printed and "The film was dull" in printed
    with pytest.raises(SystemExit):
        sentences.main(["film", "-k", "9"])
    assert "choose a smaller k" in capsys.readouterr().err


def test_the_module_is_a_command():
    done = subprocess.run([sys.executable, "-m", "annotated_nlp.sentences", "--help"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "question" in done.stdout and done.stderr == ""


# the paragraphs that come with the package ----------------------------------------------------------------------------


def test_paragraphs_are_those_of_the_pages():
    assert (ROOT / written.FILE).read_text(encoding="utf-8") == written.lines(ROOT)


def test_paragraphs_are_prose_with_an_address():
    found = paragraphs()
    assert len(found) > 1500 and len({one.page for one in found}) > 60
    assert all((ROOT / "nbs" / f"{one.page}.ipynb").exists() for one in found)
    assert not [one for one in found if "](" in one.text or one.text.startswith(("|", "#", "-", "!", ":::"))]
    assert (ROOT / written.FILE).stat().st_size < 1_000_000
    site = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))["website"]["site-url"]
    assert found[0].address == f"{site}/{found[0].page}.html"


@pytest.mark.parametrize("text,wanted", [
    ("A **bold** and *thin* word, 2 * 3 * 4.", "A bold and thin word, 2 * 3 * 4."),
    ("See [chapter 5](05_attention.ipynb#x) and `code_here`.", "See chapter 5 and code_here."),
    ("many words " * 60, None),
])
def test_marks_are_taken_off(text, wanted):
    plain = written.plain(text)
    if wanted is None:
        assert text.startswith(plain.removesuffix(" …")) and len(plain) <= written.LONGEST + 2 and plain.endswith(("words …", "many …"))
    else:
        assert plain == wanted
