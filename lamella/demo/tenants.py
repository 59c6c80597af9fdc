"""Four tenants of entity classification, from public labelled data: an entity in a text gets one label.

| tenant | texts | rows | labels |
|---|---|---|---|
| addresses | postal addresses | 7,735 | 10 |
| parties | people and companies | 4,854 | 9 |
| foods | food descriptions | 6,798 | 21 |
| courts | names of courts | 3,477 | 5 |

Rows are deduplicated by (text, entity), ignoring case and blanks; pairs with two labels are left out.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from lamella.demo import packages
from lamella.eval.split import stable_order
from lamella.eval.task import TaskRow

ADDRESS_LABELS = {
    "AddressNumber": "house number",
    "StreetName": "street name",
    "StreetNamePostType": "street type",
    "StreetNamePreDirectional": "direction before street",
    "StreetNamePostDirectional": "direction after street",
    "PlaceName": "city",
    "StateName": "state",
    "ZipCode": "zip code",
    "OccupancyType": "unit type",
    "OccupancyIdentifier": "unit number",
}
PARTY_LABELS = {
    "GivenName": "given name",
    "Surname": "surname",
    "MiddleInitial": "middle initial",
    "MiddleName": "middle name",
    "SuffixGenerational": "generation",
    "PrefixMarital": "title",
    "CorporationName": "company name",
    "CorporationNameOrganization": "organization type",
    "CorporationLegalType": "legal form",
}
FOOD_LABELS = {
    "American Indian/Alaska Native Foods": "native american food",
    "Baked Products": "baked goods",
    "Beef Products": "beef",
    "Beverages": "drinks",
    "Breakfast Cereals": "breakfast cereals",
    "Cereal Grains and Pasta": "grains and pasta",
    "Dairy and Egg Products": "dairy and eggs",
    "Fats and Oils": "fats and oils",
    "Finfish and Shellfish Products": "fish and shellfish",
    "Fruits and Fruit Juices": "fruit",
    "Lamb, Veal, and Game Products": "lamb, veal and game",
    "Legumes and Legume Products": "legumes",
    "Nut and Seed Products": "nuts and seeds",
    "Pork Products": "pork",
    "Poultry Products": "poultry",
    "Sausages and Luncheon Meats": "sausages and cold cuts",
    "Snacks": "snacks",
    "Soups, Sauces, and Gravies": "soups and sauces",
    "Spices and Herbs": "spices and herbs",
    "Sweets": "sweets",
    "Vegetables and Vegetable Products": "vegetables",
}
COURT_LABELS = {
    "trial": "trial court",
    "appellate": "appeals court",
    "special": "special court",
    "bankruptcy": "bankruptcy court",
    "ag": "attorney general",
}


def _row(tenant: str, text: str, entity: str, label: str) -> TaskRow:
    return TaskRow(tenant=tenant, text=text, entity=entity, label=label)


def _clean(text: str) -> str:
    return " ".join(text.split())


def _tagged_spans(xml: bytes) -> Iterator[tuple[str, str, str]]:
    """(whole text, joined tokens, tag) of each run of equal tags in each labelled string."""
    for string in ET.fromstring(xml):
        runs: list[tuple[str, list[str]]] = []
        for token in string:
            if runs and runs[-1][0] == token.tag:
                runs[-1][1].append(token.text or "")
            else:
                runs.append((token.tag, [token.text or ""]))
        text = _clean("".join(string.itertext()))
        for tag, words in runs:
            yield text, _clean(" ".join(words)).strip(" ,;"), tag


def addresses(downloads: Path) -> Iterator[TaskRow]:
    """Runs of address tokens with the ten most frequent tags (usaddress, MIT)."""
    xml = packages.read_member(downloads, packages.USADDRESS, "usaddress-0.5.16/training/labeled.xml")
    for text, entity, tag in _tagged_spans(xml):
        if tag in ADDRESS_LABELS:
            yield _row("addresses", text, entity, ADDRESS_LABELS[tag])


def parties(downloads: Path) -> Iterator[TaskRow]:
    """Runs of name tokens of people and companies with the nine most frequent tags (probablepeople, MIT)."""
    for kind in ("company", "person"):
        member = f"probablepeople-0.5.6/name_data/labeled/{kind}_labeled.xml"
        for text, entity, tag in _tagged_spans(packages.read_member(downloads, packages.PROBABLEPEOPLE, member)):
            if tag in PARTY_LABELS:
                yield _row("parties", text, entity, PARTY_LABELS[tag])


def foods(downloads: Path) -> Iterator[TaskRow]:
    """Foods of the USDA's SR Legacy list with their food group; the entity is the description's head."""
    member = "ingredient_parser/en/data/fdc_ingredients.csv.gz"
    table = gzip.decompress(packages.read_member(downloads, packages.INGREDIENTS, member)).decode("utf-8")
    for record in csv.DictReader(io.StringIO(table)):
        if record["data_type"] == "sr_legacy_food":
            text = _clean(record["description"])
            yield _row("foods", text, text.split(",")[0], FOOD_LABELS[record["category"]])


def courts(downloads: Path) -> Iterator[TaskRow]:
    """Names of courts, and examples of how they are written, with the kind of court (courts-db, BSD-2)."""
    listing = json.loads(packages.read_member(downloads, packages.COURTS, "courts_db/data/courts.json"))
    for court in listing:
        label = COURT_LABELS.get(court.get("type"))
        if label:
            for name in (court["name"], *court["examples"]):
                yield _row("courts", _clean(name), _clean(name), label)


TENANTS = {"addresses": addresses, "parties": parties, "foods": foods, "courts": courts}


def distinct(rows: Iterator[TaskRow]) -> list[TaskRow]:
    """One row per (text, entity), ignoring case; pairs seen with two labels are left out. Order is kept."""
    seen: dict[tuple[str, str], list[TaskRow]] = defaultdict(list)
    for row in rows:
        if row.text and row.entity:
            seen[row.text.lower(), row.entity.lower()].append(row)
    return [group[0] for group in seen.values() if len({row.label for row in group}) == 1]


def sample(rows: list[TaskRow], count: int) -> list[TaskRow]:
    """Up to `count` rows, spread over the labels as evenly as their numbers allow; deterministic, order mixed.

    Rows of one label come in the order of a hash of (text, entity), so the choice does not depend on the file's order.
    """

    def key(row: TaskRow) -> str:
        return stable_order(f"{row.text}\n{row.entity}", seed=0)

    by_label: dict[str, list[TaskRow]] = defaultdict(list)
    for row in sorted(rows, key=key):
        by_label[row.label].append(row)
    queues = [by_label[label] for label in sorted(by_label)]
    turn, chosen = 0, list[TaskRow]()
    while len(chosen) < count and any(turn < len(queue) for queue in queues):
        chosen += [queue[turn] for queue in queues if turn < len(queue)][: count - len(chosen)]
        turn += 1
    return sorted(chosen, key=key)
