"""Every recipe as a command, for each of its cards: what tests/launch/golden/ holds.

    python -m tests.launch.golden     writes the files anew; look at the difference before you commit it.

A recipe of our own engine is translated for both others, as when somebody adds --engine to it.
"""

import json
from pathlib import Path

from blockdraft.launch import translate
from blockdraft.launch.launch_request import LaunchRequest
from blockdraft.machine.cards import card_by_key
from blockdraft.machine.machine import Gpu, Machine
from blockdraft.planner.resolver import with_drafter
from blockdraft.settings.merge import merge_settings
from blockdraft.settings.recipe import load_recipe, recipe_names

FOLDER = Path(__file__).parent / "golden"
PORT = 18000


def machine_with(key):
    """A machine with one card of the table; a driver's name and version are not needed."""
    card = card_by_key(key)
    memory = card.memory_bytes
    gpu = Gpu(card.title, card.capability, memory, memory, "580.95", card.is_unified)
    return Machine(memory_bytes=memory, gpu_bytes=memory, gpu_free_bytes=memory, gpus=(gpu,))


def recipe_settings(name):
    """The settings of a recipe, once per engine that it can be started with."""
    own = load_recipe(name).settings.get("engine", "native")
    engines = [own] if own != "native" else ["vllm", "sglang"]
    merged = [merge_settings({"recipe": name, "engine": one}, uses_environment=False) for one in engines]
    return [with_drafter(one.settings) for one in merged]


def recipe_commands(name):
    """(engine, card or "any") and the command, for each."""
    for settings in recipe_settings(name):
        for card in load_recipe(name).cards or ["any"]:
            machine = None if card == "any" else machine_with(card)
            order = LaunchRequest(settings=settings, served_name=name, port=PORT, machine=machine)
            yield settings.engine, card, translate(order)


def recipe_golden(name):
    found = {}
    for engine, card, command in recipe_commands(name):
        shown = {"version": command.version, "image": command.image, "env": dict(command.env)}
        found[f"{engine} {card}"] = {**shown, "argv": list(command.argv)}
    return found


def golden_path(name):
    return FOLDER / f"{name}.json"


def main():
    for name in recipe_names():
        golden_path(name).write_text(json.dumps(recipe_golden(name), indent=1) + "\n")


if __name__ == "__main__":
    main()
