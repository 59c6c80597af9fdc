"""Broken files beside an adapter's weights."""

import json

import pytest

from lamella.adapter import Adapter
from lamella.adapter.peft_format import CONFIG, FACTS
from lamella.config import LoraConfig
from lamella.errors import UserError
from lamella.eval.encoder import StoreEncoder
from tests.adapter.test_adapter import SKELETON_OF_DENSE


