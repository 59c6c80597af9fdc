from collections import Counter

import pytest

from lamella.demo import packages, tenants
from lamella.eval.task import TaskRow


def row(text, entity, label):
    return TaskRow(tenant="t", text=text, entity=entity, label=label)


XML = b"""<AddressCollection>
  <AddressString><AddressNumber>12</AddressNumber> <StreetName>Old</StreetName> <StreetName>Mill,</StreetName>
  <NotAddress>c/o</NotAddress> <StreetName>Lane</StreetName></AddressString>
  <AddressString><PlaceName>Troy</PlaceName>
  </AddressString>
</AddressCollection>"""


@pytest.fixture
def archive(monkeypatch):
    """Package members from a dict in place of downloaded archives."""
    members = {}
    monkeypatch.setattr(packages, "read_member", lambda folder, package, member: members[member])
    return members


def test_runs_of_equal_tags_become_one_entity(archive, tmp_path):
    archive["usaddress-0.5.16/training/labeled.xml"] = XML
    found = [(r.text, r.entity, r.label) for r in tenants.addresses(tmp_path)]
    whole = "12 Old Mill, c/o Lane"
    assert found == [
        (whole, "12", "house number"),
        (whole, "Old Mill", "street name"),
        (whole, "Lane", "street name"),
        ("Troy", "Troy", "city"),
    ]


def test_courts_take_names_and_examples_of_known_kinds(archive, tmp_path):
    archive["courts_db/data/courts.json"] = (
        b'[{"name": "Supreme  Court", "type": "appellate", "examples": ["The Supreme Court"]},'
        b' {"name": "Odd Court", "type": "international", "examples": []}, {"name": "No Type", "examples": []}]'
    )
    assert [(r.text, r.label) for r in tenants.courts(tmp_path)] == [
        ("Supreme Court", "appeals court"),
        ("The Supreme Court", "appeals court"),
    ]


def test_distinct_drops_repeats_and_contradictions():
    rows = [
        row("A b", "A", "x"),
        row("a B", "a", "x"),  # the same, in other case
        row("A b", "b", "x"),
        row("A b", "B", "y"),  # two labels for one pair
        row("c", "", "x"),  # nothing to label
    ]
    assert tenants.distinct(iter(rows)) == [rows[0]]


def test_sample_is_even_over_labels_and_independent_of_order():
    rows = [row(f"text {i}", "e", "common" if i % 10 else "rare") for i in range(200)]
    chosen = tenants.sample(rows, 50)
    assert Counter(r.label for r in chosen) == {"rare": 20, "common": 30}
    assert tenants.sample(rows[::-1], 50) == chosen
    assert tenants.sample(rows, 1000) == tenants.sample(rows, 200)
    assert len(tenants.sample(rows, 7)) == 7


def test_labels_differ_within_a_tenant():
    for labels in (tenants.ADDRESS_LABELS, tenants.PARTY_LABELS, tenants.FOOD_LABELS, tenants.COURT_LABELS):
        assert len(set(labels.values())) == len(labels)
    counts = map(len, (tenants.ADDRESS_LABELS, tenants.PARTY_LABELS, tenants.FOOD_LABELS, tenants.COURT_LABELS))
    assert list(counts) == [10, 9, 21, 5]
