"""Reads hub sources named on standard input (JSON), one answer a line; run as a process of its own,
since the hub's address and offline switch are read when its library is imported."""

import json
import os
import sys

from configs import UserError
from configs.schema import SourceConfig
from data_prep.sources import Tally, open_source

for line in sys.stdin:
    try:
        source = open_source(SourceConfig(kind="hub", **json.loads(line)))
        units = source.ranges()
        paths = [piece.path for unit in units for piece in unit.pieces]
        texts = [d.paragraphs for unit in units for d in source.documents(unit, Tally())]
        print(json.dumps({"paths": paths, "texts": texts}), flush=True)
    except UserError as error:
        print(json.dumps({"error": str(error)}), flush=True)
# Threads of the streaming libraries may be at work still, and abort an interpreter that goes before them.
os._exit(0)
