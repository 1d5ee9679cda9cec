"The family after BERT: what test_parity.py doesn't ask of RoBERTa and ALBERT, SpanBERT's second head by its equation, shares of languages."

import json
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import nn
from torch.testing import assert_close

import messages
import test_invariants
import twins
from parity import DEVICES, close, lengths
from twins import ROWS, parameters
from annotated_nlp.bert import Bert, BertConfig, BertForMaskedLM
from annotated_nlp.bert_family import Albert, AlbertConfig, AlbertForMaskedLM
from annotated_nlp.bert_family import AlbertForSentenceOrder, BoundaryHead, Roberta
from annotated_nlp.bert_family import RobertaConfig, RobertaForMaskedLM, SpanBert
from annotated_nlp.bert_family import boundaries, language_shares
from annotated_nlp.transformer import Stack

unchecked = test_invariants.unchecked  # as a user has the package
SMALL = twins.ENCODER_SMALL


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def small(model, config, loud=0.3, **changes):
    return twins.made_loud(model(config(**SMALL | changes)), loud)


roberta = partial(small, Roberta, RobertaConfig, max_len=26)
albert = partial(small, Albert, AlbertConfig, d_embedding=12)
spanbert = partial(small, SpanBert, BertConfig)


# RoBERTa


@torch.no_grad()
@pytest.mark.parametrize("pad_id", [0, 1, 5])
def test_positions_count_real_pieces(pad_id, tmp_path):
    "Padding before, between and behind the pieces, as `transformers` reads it from the ids."
    ours, theirs = ROWS["RobertaForMaskedLM"].both(tmp_path, pad_token_id=pad_id)
    ids = torch.randint(29, (6, 11))
    ids[:3][torch.rand(3, 11) < 0.4] = pad_id
    ids[3, :4], ids[4, 7:] = pad_id, pad_id
    mask = ids != pad_id
    wanted = theirs(ids, attention_mask=mask.long()).logits
    close(ours(ids, mask=mask)[mask], wanted[mask])
    lone = ours(ids[3:4, 4:])
    close(ours(ids, mask=mask)[3, 4:], lone[0])


@torch.no_grad()
def test_the_first_piece_has_position_two():
    "The rows of the table before it are never read but for padding's."
    model, ids = roberta(), torch.randint(2, 29, (2, 24))
    wanted = model(ids)
    model.embedding.positions.table[:2] = math.nan
    assert torch.equal(model(ids), wanted)
    model.embedding.positions.table[2] = math.nan
    assert model(ids).isnan().any()


@torch.no_grad()
def test_files_of_xlm_r(tmp_path):
    "The same network under another name."
    options = dict(vocab_size=29, max_position_embeddings=26, hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=48, type_vocab_size=1, initializer_range=0.3)
    theirs = transformers.XLMRobertaForMaskedLM(transformers.XLMRobertaConfig(**options)).eval()
    theirs.save_pretrained(tmp_path / "a")
    ours, ids = RobertaForMaskedLM.from_pretrained(tmp_path / "a"), torch.randint(2, 29, (3, 9))
    close(ours(ids), theirs(ids).logits)
    ours.save_pretrained(tmp_path / "b")
    close(transformers.XLMRobertaForMaskedLM.from_pretrained(tmp_path / "b").eval()(ids).logits, theirs(ids).logits)


@pytest.mark.parametrize("size,printed", [("xlm_base", 270e6), ("xlm_large", 550e6)])
def test_sizes_of_xlm_r(size, printed):
    "Conneau et al. 2020, appendix, table 11."
    assert abs(parameters(lambda: Roberta(getattr(RobertaConfig, size)())) / printed - 1) < 0.035


# SpanBERT


def spans_of(rows):
    "By brute force: (row, left, right, number) of every chosen position."
    found = []
    for b, row in enumerate(rows):
        for i, chosen in enumerate(row):
            if chosen:
                left = max(j for j in range(i) if not row[j])
                right = min(j for j in range(i, len(row)) if not row[j])
                found.append((b, left, right, i - left - 1))
    return found


@DEVICES
def test_boundaries_by_brute_force(device):
    for rate in (0.1, 0.5, 0.9):
        chosen = torch.rand(20, 17) < rate
        chosen[:, [0, -1]] = False
        found = boundaries(chosen.to(device))
        assert [*zip(*(x.tolist() for x in found))] == spans_of(chosen.tolist())
    assert all(len(x) == 0 for x in boundaries(torch.zeros(2, 5, dtype=torch.bool, device=device)))


def by_equation(head, pieces, left, right, number):
    "Section 3.2, one position, in double precision and without the module's own layers."
    w = {name: p.double() for name, p in head.named_parameters()}

    def layer(x, name):
        x = w[f"{name}.weight"] @ x + w[f"{name}.bias"]
        x = x * (1 + torch.erf(x / math.sqrt(2))) / 2
        x = (x - x.mean()) / (x.var(correction=0) + 1e-12).sqrt()
        return w[f"{name}_norm.weight"] * x + w[f"{name}_norm.bias"]

    h0 = torch.cat([left.double(), right.double(), w["numbers.weight"][min(number, 19)]])
    return pieces.double() @ layer(layer(h0, "first"), "second") + w["bias"]


@torch.no_grad()
def test_the_boundary_objective_by_its_equation():
    model, ids = spanbert(max_len=40), torch.randint(29, (3, 40))
    chosen = torch.zeros(3, 40, dtype=torch.bool)
    chosen[0, 2:27], chosen[1, 5], chosen[2, 1:3], chosen[2, 4:39] = True, True, True, True
    states = model(ids)
    found, pieces = model.boundary(states, chosen), model.trunk.embedding.tokens.weight
    for logits, (b, left, right, number) in zip(found, spans_of(chosen.tolist()), strict=True):
        wanted = by_equation(model.span_boundary, pieces, states[b, left], states[b, right], number)
        close(logits.double(), wanted)


def test_the_boundary_objective_looks_at_boundaries_alone():
    "Whatever the states within a span are; and at nothing else outside."
    model = spanbert()
    states = torch.randn(1, 9, 32, requires_grad=True)
    chosen = torch.zeros(1, 9, dtype=torch.bool)
    chosen[0, 3:6] = True
    model.boundary(states, chosen).square().sum().backward()
    assert (states.grad[0].abs().amax(-1) > 0).nonzero()[:, 0].tolist() == [2, 6]


def test_both_heads_share_the_embedding():
    model = spanbert()
    assert sum(p.shape == (29, 32) for p in model.parameters()) == 1
    own = sum(p.numel() for p in model.span_boundary.parameters())
    assert own == 20 * 200 + (64 + 200) * 32 + 32 + 2 * 32 + 32 * 32 + 32 + 2 * 32 + 29
    assert parameters(lambda: SpanBert(BertConfig(**SMALL))) - own == parameters(lambda: BertForMaskedLM(BertConfig(**SMALL)))


@torch.no_grad()
def test_spanbert_is_a_bert_for_transformers(tmp_path):
    "Its file: trunk and first head are read there; here both heads come back, and into other models what they need."
    model, ids, mask = spanbert(), torch.randint(1, 29, (3, 9)), lengths(9, 4, 6)
    model.save_pretrained(tmp_path / "a")
    theirs, info = transformers.BertForMaskedLM.from_pretrained(tmp_path / "a", output_loading_info=True)
    assert not info["missing_keys"] and {name.split(".")[0] for name in info["unexpected_keys"]} == {"span_boundary"}
    wanted = theirs.eval()(ids, attention_mask=mask.long()).logits
    close(model.pieces(model(ids, mask=mask))[mask], wanted[mask])
    back = SpanBert.from_pretrained(tmp_path / "a")
    for p, q in zip(back.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)
    for kind in (Bert, BertForMaskedLM):
        kind.from_pretrained(tmp_path / "a", **dict(pooler=False) if kind is Bert else {})
    theirs.save_pretrained(tmp_path / "b")
    with pytest.raises(ValueError, match="span_boundary.*fresh="):
        SpanBert.from_pretrained(tmp_path / "b")
    begun = SpanBert.from_pretrained(tmp_path / "b", fresh="span_boundary")
    close(begun.pieces(begun(ids, mask=mask))[mask], wanted[mask])
    assert 0.015 < begun.span_boundary.first.weight.std() < 0.025


def test_the_boundary_head_learns_what_its_number_says():
    "Texts that count upwards: between two numbers the third is known from either side and its number."
    torch.manual_seed(2)
    head, pieces = BoundaryHead(BertConfig(**SMALL, eps=1e-12), width=16), torch.randn(29, 32)
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    for _ in range(300):
        left, number = torch.randint(15, (64,)), torch.randint(5, (64,))
        wanted = left + 1 + number
        loss = F.cross_entropy(head(pieces[left], pieces[left + 6], number, pieces), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1


# ALBERT


@torch.no_grad()
def test_one_block_is_all_its_layers(tmp_path):
    "A BERT whose blocks all hold the one block's values gives the same."
    model = albert(n_layers=4)
    bert = Bert(BertConfig(**SMALL | dict(n_layers=4, d_embedding=12, activation="gelu_tanh"))).eval()
    assert len(model.stack.blocks) == 1 and len(bert.stack.blocks) == 4
    values = model.state_dict()
    bert.load_state_dict({name: values[name.replace(f"blocks.{name.split('.')[2]}.", "blocks.0.") if "blocks" in name else name] for name in bert.state_dict()})
    ids, mask = torch.randint(29, (3, 9)), lengths(9, 4, 6)
    for x, y in zip(model.states(ids, mask, all_layers=True), bert.states(ids, mask, all_layers=True), strict=True):
        close(x, y, 1e-6)


def test_its_gradient_is_the_sum_over_the_layers():
    model = albert(n_layers=3)
    weight, ids = model.stack.blocks[0].feed_forward.layer.down.weight, torch.randint(29, (2, 7))
    model(ids).square().mean().backward()
    apart = Stack(BertConfig(**SMALL | dict(activation="gelu_tanh")), 3).eval()
    for block in apart.blocks:
        block.load_state_dict(model.stack.blocks[0].state_dict())
    apart(model.project(model.embedding(ids)).detach()).square().mean().backward()
    close(weight.grad, sum(block.feed_forward.layer.down.weight.grad for block in apart.blocks))


@torch.no_grad()
def test_rank_of_the_embedding():
    "The lecture's question: V x E times E x H has at most rank E, whatever the width."
    model = albert(d_embedding=12, d_model=32)
    full = model.embedding.tokens.weight @ model.project.weight.T
    assert full.shape == (29, 32) and torch.linalg.matrix_rank(full) == 12
    assert torch.linalg.matrix_rank(small(Bert, BertConfig).embedding.tokens.weight) == 29


def test_three_settings_make_a_bert_an_albert():
    made = AlbertConfig(**SMALL, d_embedding=12)
    bert = BertConfig(**{name: getattr(made, name) for name in BertConfig.__dataclass_fields__})
    assert parameters(lambda: Bert(bert)) == parameters(lambda: Albert(made))
    assert (AlbertConfig().shared, AlbertConfig().d_embedding, AlbertConfig().vocab_size) == (True, 128, 30_000)


def test_an_old_file(tmp_path):
    "As the second version's configurations have it: options of their own code, which change nothing."
    theirs = ROWS["AlbertForMaskedLM"].model_of_theirs()
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= dict(classifier_dropout_prob=0.1, down_scale_factor=1, gap_size=0, net_structure_type=0, num_memory_blocks=0)
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = torch.randint(1, 29, (2, 9))
    close(AlbertForMaskedLM.from_pretrained(tmp_path)(ids), theirs(ids).logits)


def test_the_trunk_of_one_is_the_others(tmp_path):
    "Pretrained on both tasks, then read as a trunk, and with the first head alone."
    ours, theirs = ROWS["AlbertForPreTraining"].both(tmp_path)
    ids = torch.randint(1, 29, (2, 9))
    close(Albert.from_pretrained(tmp_path)(ids), theirs.albert(ids).last_hidden_state)
    close(AlbertForMaskedLM.from_pretrained(tmp_path)(ids), ours(ids)[0].detach())
    assert "order.weight" in dict(ours.named_parameters()) and any(name.startswith("sop_classifier") for name in load_file(tmp_path / "model.safetensors"))


# Languages


def test_shares_by_hand():
    counts = torch.tensor([900.0, 90.0, 10.0])
    assert_close(language_shares(counts, 1.0), torch.tensor([0.9, 0.09, 0.01]))
    assert_close(language_shares(counts, 0.0), torch.full((3,), 1 / 3))
    half = counts.sqrt()
    assert_close(language_shares(counts, 0.5), half / half.sum())
    for alpha in (0.0, 0.3, 0.7, 1.0):
        q = language_shares(counts, alpha)
        assert_close(q[0] / q[2], torch.tensor(90.0**alpha))
        assert abs(q.sum() - 1) < 1e-6


# What a hostile user tries


FLAG = torch.zeros(2, 5, dtype=torch.bool)
EDGE = FLAG.clone()
EDGE[0, 0] = True
IDS = torch.full((2, 25), 5)

test_bad_calls = messages.refused([
    (lambda: roberta()(IDS), ["25", "max_len=24"]),
    (lambda: roberta(max_len=25)(IDS[:, :24]), ["24", "23"]),
    (lambda: RobertaConfig(**SMALL | dict(max_len=2)), ["max_len=2"]),
    (lambda: RobertaConfig(**SMALL, pad_id=29), ["pad_id=29", "29"]),
    (lambda: AlbertConfig(**SMALL, shared=1), ["shared=1"]),
    (lambda: spanbert().boundary(torch.randn(2, 5, 32), FLAG.long()), ["chosen", "int64", "bool"]),
    (lambda: spanbert().boundary(torch.randn(2, 5, 32), FLAG[:, :4]), ["chosen", "(2, 4)", "(2, 5)"]),
    (lambda: boundaries(EDGE), ["chosen", "first or last"]),
    (lambda: boundaries(EDGE.flip(1)), ["chosen", "first or last"]),
    (lambda: boundaries(FLAG[0]), ["chosen", "(b, n)"]),
    (lambda: language_shares(torch.tensor([1.0, 0.0])), ["counts", "positive"]),
    (lambda: language_shares(torch.tensor([1.0, 2.0]), 1.5), ["alpha=1.5"]),
], or_else="keep")


@torch.no_grad()
def test_what_order_means(tmp_path):
    "0 in the text's order, as `transformers` says of its labels; the head reads the pooled first state."
    model = small(AlbertForSentenceOrder, AlbertConfig, d_embedding=12)
    states = model.trunk(torch.randint(29, (3, 9)))
    close(model.in_order(states), model.order(model.trunk.pooler(states)))
    assert isinstance(model.order, nn.Linear) and model.in_order(states).shape == (3, 2)
