"ELECTRA's models against `transformers` with the same weights, its samples by their statistics, its losses by hand."

import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.testing import assert_close

import messages
import test_invariants
import twins
from parity import GPU, close, lengths
from twins import ROWS, parameters
from annotated_nlp import electra
from annotated_nlp.bert import Bert, BertConfig
from annotated_nlp.denoising import Masked, mask_pieces
from annotated_nlp.electra import Electra, ElectraConfig, ElectraForMaskedLM
from annotated_nlp.electra import ElectraForPreTraining
from annotated_nlp.electra import ElectraForSequenceClassification, ElectraPair, Judged
from annotated_nlp.electra import electra_loss

unchecked = test_invariants.unchecked  # as a user has the package
SMALL = ROWS["ElectraModel"].small
HEADS = ["ElectraForMaskedLM", "ElectraForPreTraining", "ElectraForSequenceClassification", "ElectraForTokenClassification"]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def small(model=Electra, loud=0.3, **changes):
    "Ours alone."
    return twins.made_loud(model(ElectraConfig(**SMALL | changes)), loud)


def pair_(share=0.5, **changes):
    return ElectraPair(small(ElectraForMaskedLM, **changes | {key: max(1, int(share * SMALL[key])) for key in ("d_model", "n_heads", "d_ff")}), small(ElectraForPreTraining, **changes))


# Values, losses, gradients


def test_with_berts_width_it_is_bert(tmp_path):
    "An embedding of the blocks' width has no projection, and what is left is BERT."
    sizes = SMALL | dict(d_embedding=32)
    ours, bert = small(d_embedding=32), Bert(BertConfig(**{key: size for key, size in sizes.items() if key != "d_embedding"}), pooler=False).eval()
    assert isinstance(ours.project, nn.Identity)
    bert.load_state_dict({name.replace("shared.", ""): value for name, value in ours.state_dict().items()})
    ids, mask = torch.randint(29, (3, 9)), lengths(9, 4, 6)
    assert torch.equal(ours(ids, mask=mask), bert(ids, mask=mask))


def test_the_generators_matrix_is_the_embeddings():
    "Logits of the states at some places are those of all, at these; one matrix of pieces, learned from both ends."
    model, ids, chosen = small(ElectraForMaskedLM), torch.randint(29, (3, 9)), torch.rand(3, 9) < 0.3
    states = model.trunk(ids)
    close(model.pieces(states[chosen]), model(ids)[chosen].detach())
    assert sum(p.shape == (29, 20) for p in model.parameters()) == 1
    unread = next(i for i in range(29) if not (ids == i).any())
    model(ids)[..., unread].sum().backward()
    assert model.trunk.embedding.tokens.weight.grad[unread].abs().max() > 0


@pytest.mark.parametrize("first", ["ElectraForMaskedLM", "ElectraForPreTraining"])
def test_pretrained_goes_into_every_model(first, tmp_path):
    "From either of the pair, what a model has no use for stays behind and what it lacks must be named."
    theirs = ROWS[first].model_of_theirs()
    theirs.save_pretrained(tmp_path)
    ids = torch.randint(29, (2, 9))
    states = theirs.electra(ids).last_hidden_state
    close(Electra.from_pretrained(tmp_path)(ids), states)
    for name in HEADS:
        head = {"ElectraForMaskedLM": "mlm", "ElectraForPreTraining": "rtd"}.get(name, "classifier")
        if name == first:
            close(ROWS[name].ours.from_pretrained(tmp_path)(ids), theirs(ids).logits)
            continue
        with pytest.raises(ValueError, match="lacks .*fresh="):
            ROWS[name].ours.from_pretrained(tmp_path)
        model = ROWS[name].ours.from_pretrained(tmp_path, fresh=head)
        close(model.trunk(ids), states)
        for p in model.get_submodule(head).parameters():
            assert p.isfinite().all() and (p.ndim == 1 or 0.01 < p.std() < 0.03)


# Sizes and beginnings


@pytest.mark.parametrize("size,share,trunk", [("small", 1, 13_548_800), ("base", 1 / 3, 33_576_960), ("large", 1 / 4, 51_065_344)])
def test_released_generators(size, share, trunk):
    "Counts of the published generators' trunks, by Keras Hub, which adds a pooler of 256 to 256: the small one is as wide as its discriminator."
    assert parameters(lambda: Electra(getattr(ElectraConfig, size)().generator(share))) + 256 * 256 + 256 == trunk


def test_settings_of_the_paper():
    "Table 6; the generator's share acts on width, heads and feed-forward layer, not on embedding and depth."
    sizes = [ElectraConfig.small(), ElectraConfig.base(), ElectraConfig.large()]
    assert [(c.n_layers, c.d_model, c.d_ff, c.n_heads, c.d_embedding) for c in sizes] == [(12, 256, 1024, 4, 128), (12, 768, 3072, 12, 768), (24, 1024, 4096, 16, 1024)]
    for c, share, wanted in zip(sizes, (1 / 4, 1 / 3, 1 / 4), [(64, 256, 1), (256, 1024, 4), (256, 1024, 4)]):
        assert (c.vocab_size, c.max_len, c.n_segments, c.norm_first, c.activation, c.dropout, c.eps) == (30_522, 512, 2, False, "gelu", 0.1, 1e-12)
        g = c.generator(share)
        assert (g.d_model, g.d_ff, g.n_heads) == wanted and replace(g, d_model=c.d_model, d_ff=c.d_ff, n_heads=c.n_heads) == c
    assert ElectraConfig() == sizes[0] and ElectraConfig.small().generator(1) == sizes[0]
    changed = ElectraConfig.large(vocab_size=7, dropout=0.0)
    assert (changed.vocab_size, changed.dropout, changed.d_model) == (7, 0.0, 1024)


@pytest.mark.parametrize("name,places", [("ElectraModel", 1), ("ElectraForSequenceClassification", 2), ("ElectraForTokenClassification", 2)])
def test_dropout(name, places):
    "On the embeddings, on each sublayer's output, and before a classifier's layers; all with one rate, none at evaluation."
    model = small(ROWS[name].ours, dropout=0.25)
    rates = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
    assert set(rates) == {0.25} and len(rates) == places + 2 * 2
    ids = torch.randint(29, (2, 5))
    assert torch.equal(model(ids), model(ids)) and not torch.equal(model.train()(ids), model(ids))


def test_the_classifiers_dropout_acts_twice(tmp_path):
    "Before and behind the dense layer: the share of zeros at the last layer's input and at the first's."
    head, seen = small(ElectraForSequenceClassification, loud=0.02, d_model=512, dropout=0.25).classifier.train(), {}
    for part in ("dense", "out"):
        getattr(head, part).register_forward_pre_hook(lambda module, x, part=part: seen.update({part: x[0]}))
    head(torch.randn(50, 3, 512))
    for part, x in seen.items():
        assert abs((x == 0).float().mean() - 0.25) < 0.02, part


# The pair


def masked_(ids, candidates=None, **shares):
    candidates = torch.ones_like(ids, dtype=torch.bool) if candidates is None else candidates
    return mask_pieces(ids, candidates, mask_id=4, vocab_size=29, **dict(rate=0.4, masked=1.0, random=0.0) | shares)


def test_the_pair_is_its_two_models():
    "Each reads what it should: the generator the gaps, the discriminator the text with samples in them; no sample depends on a gradient."
    pair, mask = pair_(), lengths(9, 4, 6)
    ids, segments = torch.randint(5, 29, (3, 9)), torch.randint(2, (3, 9))
    masked = masked_(ids, mask)
    found = pair(ids, masked, segments, mask)
    close(found.pieces, pair.generator(masked.ids, segments, mask)[masked.chosen].detach())
    close(found.logits[mask], pair.discriminator(found.ids, segments, mask)[mask].detach())
    assert torch.equal(found.replaced, found.ids != ids) and torch.equal(found.ids[~masked.chosen], ids[~masked.chosen])
    assert not (found.ids == masked.ids)[masked.chosen].all()


def test_samples_go_into_the_original():
    "Of 80/10/10, too, the discriminator sees neither masks nor random pieces, only samples."
    pair, ids = pair_(), torch.randint(5, 29, (20, 20))
    masked = masked_(ids, masked=0.3, random=0.6)
    with torch.no_grad():
        pair.generator.mlm.bias.copy_(1e6 * F.one_hot(torch.tensor(7), 29))  # it always says 7
    found = pair(ids, masked)
    assert torch.equal(found.ids, ids.masked_fill(masked.chosen, 7)) and (masked.ids != found.ids)[masked.chosen].any()
    assert torch.equal(found.replaced, masked.chosen & (ids != 7))


def test_loss_by_transformers_and_by_hand(tmp_path):
    "Both models' own losses in `transformers`, from two folders, and the discriminator's as in equation 3."
    pair, mask = pair_(), lengths(9, 4, 6)
    ids = torch.randint(5, 29, (3, 9))
    masked = masked_(ids, mask)
    found = pair(ids, masked, None, mask)
    loss = electra_loss(ids, masked.chosen, found, mask)
    for name, model in (("g", pair.generator), ("d", pair.discriminator)):
        model.save_pretrained(tmp_path / name)
    g, d = transformers.ElectraForMaskedLM.from_pretrained(tmp_path / "g").eval(), transformers.ElectraForPreTraining.from_pretrained(tmp_path / "d").eval()
    mlm = g(masked.ids, attention_mask=mask.long(), labels=ids.masked_fill(~masked.chosen, -100)).loss
    rtd = d(found.ids, attention_mask=mask.long(), labels=found.replaced.long()).loss
    close(loss.mlm, mlm.detach())
    close(loss.rtd, rtd.detach())
    close(loss.total, (mlm + 50 * rtd).detach())
    original = found.logits.neg().sigmoid()
    by_hand = [-(math.log(1 - p) if fake else math.log(p)) for p, fake in zip(original[mask].tolist(), found.replaced[mask].tolist())]
    assert abs(loss.rtd.item() - sum(by_hand) / len(by_hand)) < 1e-5
    assert_close(electra_loss(ids, masked.chosen, found, mask, weight=3.0).total, mlm.detach() + 3 * rtd.detach(), atol=1e-5, rtol=1e-5)


def test_gradients_of_the_pair():
    "The generator learns from its own loss alone; the shared embedding from both, the sum of what each gives."
    pair, ids = pair_(), torch.randint(5, 29, (3, 9))
    masked = masked_(ids)
    found = pair(ids, masked)
    loss = electra_loss(ids, masked.chosen, found)
    shared = set(pair.discriminator.trunk.embedding.parameters())
    grad = lambda x: dict(zip(pair.parameters(), torch.autograd.grad(x, list(pair.parameters()), retain_graph=True, allow_unused=True)))
    mlm, rtd, total = grad(loss.mlm), grad(loss.rtd), grad(loss.total)
    for p in pair.generator.parameters():
        assert p in shared or rtd[p] is None
    for p in pair.discriminator.parameters():
        assert p in shared or mlm[p] is None
    for p in shared:
        assert mlm[p].abs().max() > 0 and rtd[p].abs().max() > 0
        close(total[p], mlm[p] + 50 * rtd[p])


def test_what_is_shared():
    "Pieces, places, segments and their norm; each has its own projection. Moving and loading keep it so."
    pair = pair_()
    g, d = pair.generator.trunk, pair.discriminator.trunk
    assert g.embedding is d.embedding and g.project is not d.project and g.project.weight.shape == (16, 20)
    once = sum(p.numel() for p in pair.parameters())
    assert once == sum(sum(p.numel() for p in model.parameters()) for model in (pair.generator, pair.discriminator)) - sum(p.numel() for p in g.embedding.parameters())
    for p in pair.double().parameters():
        assert p.dtype == torch.float64
    assert g.embedding is d.embedding
    with torch.device("meta"):
        ghost = pair_()
    ghost.to_empty(device="cpu").load_state_dict(pair.float().state_dict())
    assert torch.equal(ghost.generator.trunk.embedding.tokens.weight, d.embedding.tokens.weight)
    assert ghost.generator.trunk.embedding.tokens.weight is ghost.discriminator.trunk.embedding.tokens.weight


def test_two_folders(tmp_path):
    "After a step of training both are saved whole, shared tensors in each, and `transformers` gives their outputs."
    pair, ids, mask = pair_(), torch.randint(5, 29, (4, 9)), lengths(9, 4, 6, 1)
    optimizer, masked = torch.optim.SGD(pair.parameters(), lr=0.01), masked_(ids, mask)
    before = pair.generator.trunk.embedding.tokens.weight.clone()
    electra_loss(ids, masked.chosen, pair(ids, masked, None, mask), mask).total.backward()
    optimizer.step()
    assert not torch.equal(before, pair.generator.trunk.embedding.tokens.weight)
    for name, model in (("g", pair.generator), ("d", pair.discriminator)):
        model.save_pretrained(tmp_path / name)
        theirs, info = getattr(transformers, type(model).__name__).from_pretrained(tmp_path / name, output_loading_info=True)
        assert not any(info.values())
        close(model(ids, mask=mask)[mask], theirs.eval()(ids, attention_mask=mask.long()).logits[mask].detach())
    again = ElectraPair(ElectraForMaskedLM.from_pretrained(tmp_path / "g"), ElectraForPreTraining.from_pretrained(tmp_path / "d"))
    for p, q in zip(again.parameters(), pair.parameters(), strict=True):
        assert torch.equal(p, q)


def test_training_finds_what_was_replaced(unchecked):
    "Texts that count upwards: the generator learns to continue them, and the discriminator to see where they don't."
    torch.manual_seed(1)
    sizes = dict(vocab_size=29, max_len=12, d_embedding=16, d_model=32, n_heads=4, d_ff=64, n_layers=2, dropout=0.0)
    config = ElectraConfig(**sizes)
    pair = ElectraPair(ElectraForMaskedLM(config.generator(1 / 2)), ElectraForPreTraining(config))
    for p in pair.parameters():
        p.data.mul_(5 if p.ndim > 1 else 1)
    optimizer = torch.optim.Adam(pair.parameters(), lr=1e-3)
    for _ in range(450):
        ids = 5 + (torch.randint(24, (32, 1)) + torch.arange(10)) % 24
        masked = masked_(ids, rate=0.2)
        loss = electra_loss(ids, masked.chosen, pair(ids, masked))
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
    ids = 5 + (torch.randint(24, (200, 1)) + torch.arange(10)) % 24
    fake = torch.rand(ids.shape) < 0.15
    wrong = torch.where(fake, 5 + (ids - 5 + torch.randint(1, 24, ids.shape)) % 24, ids)
    with torch.no_grad():
        verdict = pair.discriminator(wrong) > 0
    assert (verdict == fake).float().mean() > 0.92 and loss.rtd < 0.25


def test_nothing_to_be_asked():
    "No place chosen, or nothing but padding: the losses are zero, and so are the gradients."
    pair, ids = pair_(), torch.randint(5, 29, (2, 4))
    nowhere = torch.zeros(2, 4, dtype=torch.bool)
    loss = electra_loss(ids, nowhere, pair(ids, Masked(ids, nowhere)))
    assert loss.mlm == 0 and loss.rtd > 0 and loss.total.isfinite()
    loss.total.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in pair.parameters())
    empty = electra_loss(ids, nowhere, pair(ids, Masked(ids, nowhere), None, nowhere), nowhere)
    assert empty.total == 0


def test_padding_has_no_vote():
    "Whatever the discriminator says of padding."
    ids, mask, chosen = torch.randint(5, 29, (2, 6)), lengths(6, 3), torch.zeros(2, 6, dtype=torch.bool)
    logits = torch.randn(2, 6)
    loss = lambda x: electra_loss(ids, chosen, Judged(torch.zeros(0, 29), ids, chosen, x), mask).rtd
    assert torch.equal(loss(logits), loss(logits.where(mask, math.inf)))


# What a hostile user tries

says = partial(messages.says, or_else="keep")


test_bad_settings = messages.refused([
    *((dict([(name, value)]), [f"{name}={value}"]) for name in ("vocab_size", "max_len", "d_embedding", "d_model", "n_heads", "d_ff", "n_layers", "n_segments", "n_classes") for value in (0, -1)),
    (dict(d_model=30), ["d_model=30", "n_heads=4"]),
    (dict(dropout=1.0), ["dropout=1.0"]),
    (dict(activation="swish"), ["activation='swish'", "gelu"]),
], lambda changes: Electra(ElectraConfig(**SMALL | changes)), or_else="keep", errors=ValueError)


FLAG = torch.ones(2, 5, dtype=torch.bool)
IDS = torch.full((2, 5), 5)


def whole(ids=IDS, segments=None, mask=None, model=ElectraForPreTraining):
    return small(model)(ids, segments, mask)


def together(**changes):
    return ElectraPair(small(ElectraForMaskedLM, **changes), small(ElectraForPreTraining))


def asked(ids=IDS, chosen=FLAG, **changes):
    return electra_loss(ids, chosen, together()(IDS, Masked(IDS, FLAG)), **changes)


test_bad_calls = messages.refused([
    (lambda: whole(torch.full((2, 25), 5)), ["25", "max_len=24"]),
    *((partial(whole, IDS + 24, model=getattr(electra, name)), ["ids", "29"]) for name in HEADS),
    (lambda: whole(IDS - 6), ["ids", "-1", "29"]),
    (lambda: whole(IDS.float()), ["ids", "float32"]),
    (lambda: whole(IDS[0]), ["ids", "(5,)"]),
    (lambda: whole(IDS[:0]), ["ids", "(0, 5)"]),
    (lambda: whole(segments=IDS), ["segments", "5", "2"]),
    (lambda: whole(segments=FLAG.long()[:, :4]), ["segments", "(2, 4)", "(2, 5)"]),
    (lambda: whole(mask=FLAG.float()), ["mask", "float32", "bool"]),
    (lambda: whole(mask=FLAG[:1]), ["mask", "(1, 5)", "(2, 5)"]),
    *((lambda share=share: ElectraConfig.small().generator(share), [f"share={share!r}"]) for share in (0, -0.5, 1.5, math.nan, "1/4")),
    (lambda: asked(chosen=FLAG.long()), ["chosen", "int64", "bool"]),
    (lambda: asked(mask=FLAG.long()), ["mask", "int64", "bool"]),
    (lambda: asked(mask=FLAG[:, :4]), ["mask", "(2, 4)", "(2, 5)"]),
    (lambda: asked(chosen=~FLAG), ["judged.pieces", "(10, ", "(0, v)"]),
    (lambda: asked(ids=IDS[:1], chosen=FLAG[:1]), ["judged.ids", "(2, 5)", "(1, 5)"]),
    (lambda: asked(weight=-1.0), ["weight=-1.0"]),
    (lambda: asked(weight=math.nan), ["weight=nan"]),
    (lambda: ElectraPair(small(ElectraForPreTraining), small(ElectraForMaskedLM)), ["generator", "ElectraForPreTraining", "ElectraForMaskedLM"]),
    (lambda: together(vocab_size=30), ["vocab_size=30", "29"]),
    (lambda: together(d_embedding=32), ["d_embedding=32", "20"]),
    (lambda: together(max_len=25), ["max_len=25", "24"]),
    (lambda: together(n_segments=1), ["n_segments=1", "2"]),
    (lambda: together(eps=1e-5), ["eps=1e-05", "1e-12"]),
    (lambda: together()(IDS, Masked(IDS[:1], FLAG[:1])), ["masked.ids", "(1, 5)", "(2, 5)"]),
], or_else="keep")


def test_bert_and_electra_are_not_taken_for_each_other(tmp_path, unchecked):
    ROWS["ElectraModel"].model_of_theirs().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model_type='electra'; Bert reads 'bert'"):
        Bert.from_pretrained(tmp_path)


def test_an_old_file(tmp_path):
    "As the first files on the hub had it: the tied matrix written twice, options that name no embedding's width left at their defaults."
    theirs = ROWS["ElectraForMaskedLM"].model_of_theirs(embedding_size=128, hidden_size=256, intermediate_size=64)
    theirs.save_pretrained(tmp_path)
    from safetensors.torch import load_file, save_file

    tensors = load_file(tmp_path / "model.safetensors")
    tensors["generator_lm_head.weight"] = tensors["electra.embeddings.word_embeddings.weight"].clone()
    tensors["electra.embeddings.position_ids"] = torch.arange(24.0)[None]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    del config["embedding_size"], config["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = torch.randint(1, 29, (2, 9))
    close(ElectraForMaskedLM.from_pretrained(tmp_path)(ids), theirs(ids).logits)


@pytest.mark.gpu
@GPU
def test_the_pair_on_a_gpu():
    "One step of training: finite, and labels that fit."
    pair, ids = pair_().to("cuda"), torch.randint(5, 29, (8, 9), device="cuda")
    masked = masked_(ids)
    found = pair(ids, masked)
    loss = electra_loss(ids, masked.chosen, found)
    loss.total.backward()
    assert loss.total.isfinite() and torch.equal(found.replaced, found.ids != ids)
