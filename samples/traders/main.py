"""Two characters trade on a market, in asyncio. Each is an agent: it calls a tool, hears what came of it, calls again.

    python samples/traders/main.py

A character offers, accepts or refuses, and :class:`Market` has the rules: nobody gives what they do not have, or trades
at a loss. A dragon flies over meanwhile, and the renderer takes VRAM back for it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import frameshard
from frameshard.models import resolve

MOVES, DRAGON_AT, DRAGON_S = 8, 3, 2.0
"""The market closes after so many moves. The dragon comes at this one, for so many seconds."""

COUNT = {"enum": [1, 2, 3, 4]}
LINES = {
    "offer": ("Smell that! Is it not good?", "Because it is you.", "I must be out of my mind.", "My last word."),
    "accept": ("Done, before you think again!", "You drive me to ruin.", "My mother warned me of you."),
    "refuse": ("Do I look like a fool?", "I would rather freeze.", "Come back when you are sober.", "Ha!"),
}
"""What a character may say with each move: the model chooses. A larger model may well say what it likes."""


@dataclass
class Trader:
    """A character. `worth` says what a piece of each good is worth to it, which the other does not know."""

    name: str
    nature: str
    goods: Counter[str]
    worth: dict[str, int]
    stubborn: bool = False
    """It has just refused a good bargain."""
    news: asyncio.Queue[str | None] = field(default_factory=asyncio.Queue)
    """What the other does; None when the market closes."""

    @property
    def wealth(self) -> int:
        return sum(count * self.worth[good] for good, count in self.goods.items())

    def __str__(self) -> str:
        return f"{self.name} has " + ", ".join(f"{count} {good}" for good, count in self.goods.items() if count)


@dataclass(frozen=True)
class Offer:
    """So many pieces of one good for so many of another."""

    give_count: int
    give: str
    take_count: int
    take: str

    def gain(self, taker: Trader) -> int:
        return self.give_count * taker.worth[self.give] - self.take_count * taker.worth[self.take]

    def __str__(self) -> str:
        return f"{self.give_count} {self.give} for {self.take_count} {self.take}"


class Market:
    """The rules. Each move returns its story, which both traders and the player hear."""

    def __init__(self, one: Trader, two: Trader) -> None:
        self.other = {one.name: two, two.name: one}
        self.table: dict[str, Offer] = {}
        """The open offer, by who has made it."""
        self.done: Counter[str] = Counter()
        self.noise = asyncio.Event()

    def tools(self, trader: Trader) -> dict[str, frameshard.Tool]:
        """The moves of a trader, as tools for the model. The schemas leave little to get wrong, the rules the rest."""
        other = self.other[trader.name]

        def tool(move: Callable[..., str], description: str, **terms: Mapping[str, Any]) -> frameshard.Tool:
            properties = {"say": {"enum": LINES[move.__name__]}, **terms}
            schema = {"properties": properties, "required": [*properties], "additionalProperties": False}
            return frameshard.Tool(move.__name__, description, schema, move)

        def offer(say: str, **terms: Any) -> str:
            return f'"{say}" {self._offer(trader, other, Offer(**terms))}'

        def accept(say: str) -> str:
            return f'"{say}" {self._accept(trader, other)}'

        def refuse(say: str) -> str:
            offer = self.table.pop(other.name, None)
            trader.stubborn = offer is not None and offer.gain(trader) > 0
            return f'"{say}" {self.tell("refused", f"{trader.name} refuses.")}'

        mine, theirs = {"enum": [*trader.goods]}, {"enum": [*other.goods]}
        tools = (
            tool(offer, "Offer goods for goods.", give_count=COUNT, give=mine, take_count=COUNT, take=theirs),
            tool(accept, f"Take what {other.name} offers."),
            tool(refuse, f"Turn down what {other.name} offers."),
        )
        return {tool.name: tool for tool in tools}

    def _offer(self, trader: Trader, other: Trader, offer: Offer) -> str:
        if offer.give_count > trader.goods[offer.give] or offer.take_count > other.goods[offer.take]:
            return self.tell("forbidden", f"{trader.name} dreams of {offer}, but there is not so much.")
        if offer.gain(trader) >= 0:
            return self.tell("forbidden", f"{trader.name} would give {offer}, but nobody trades at a loss.")
        self.table = {trader.name: offer}
        return self.tell("offered", f"{trader.name} offers {offer}.")

    def _accept(self, taker: Trader, giver: Trader) -> str:
        offer = self.table.pop(giver.name, None)
        if offer is None:
            return self.tell("forbidden", f"{taker.name} holds out a hand, but there is no offer.")
        if offer.gain(taker) <= 0:
            return self.tell("forbidden", f"{taker.name} nods, counts again, and would rather not.")
        taker.stubborn = False
        for trader, sign in ((taker, 1), (giver, -1)):
            trader.goods[offer.give] += sign * offer.give_count
            trader.goods[offer.take] -= sign * offer.take_count
        return self.tell("traded", f"{taker.name} takes {offer}, and they shake hands.")

    def tell(self, kind: str, story: str) -> str:
        self.done[kind] += 1
        if self.done.total() == DRAGON_AT:
            self.noise.set()
        return story


async def live(client: frameshard.Client, market: Market, trader: Trader) -> None:
    """An agent: what has happened goes to the model, its call of a tool to the game, and the story to the other."""
    tools, other = market.tools(trader), market.other[trader.name]
    calls: tuple[frameshard.ToolCall, ...] = ()
    while (news := await trader.news.get()) is not None:
        offer, choice = market.table.get(other.name), "offer"
        if offer is not None:  # who has refused a good bargain takes the next one
            good = offer.gain(trader) > 0
            choice = "accept" if good and trader.stubborn else "required"
            news += f" That would be a {'good' if good else 'bad'} bargain."
        sampling = frameshard.Sampling(temperature=1.3, repeat_penalty=1.4, max_tokens=100, seed=market.done.total())
        options: dict[str, Any] = {"conversation": trader.name, "tools": [*tools.values()], "tool_choice": choice}
        if calls:
            thought = client.tool_results({call.id: news for call in calls}, sampling=sampling, **options)
        else:
            thought = client.ask(news, system=trader.nature, sampling=sampling, **options)
        calls = (await thought.completed()).tool_calls
        story = tools[calls[0].name].run(calls[0]) if calls else market.tell("dithered", f"{trader.name} dithers.")
        print(f"{market.done.total():>2}. {trader.name}: {story}", flush=True)
        if market.done.total() >= MOVES:
            return other.news.put_nowait(None)
        other.news.put_nowait(f"{trader.name}: {story} {other}.")


async def dragon(client: frameshard.Client, market: Market) -> None:
    """It comes once, and the game needs VRAM for it. The traders talk on. On the CPU there is none to take back."""
    budget = await client.budget()
    if not budget.full_bytes:
        return print("    -- no dragon: this device has no VRAM --", flush=True)
    await market.noise.wait()
    near = budget.floor_bytes + (budget.full_bytes - budget.floor_bytes) // 4
    for size, story in ((near, "A dragon flies over"), (budget.full_bytes, "It has found no gold")):
        await client.set_budget(size / 2**20)
        print(f"    -- {story}: {size >> 20} MiB for the model --", flush=True)
        await asyncio.sleep(DRAGON_S)


async def play(args: argparse.Namespace) -> None:
    greta = "You are Greta, a loud baker. You are cold and want wool. You trade with Tam, a shepherd, in a few words."
    tam = "You are Tam, a shepherd who is always hungry. You trade with Greta, a baker, in a few words."
    one = Trader("Greta", greta, Counter(bread=9, honey=3), {"bread": 1, "honey": 2, "wool": 4, "cheese": 2})
    two = Trader("Tam", tam, Counter(wool=6, cheese=4), {"bread": 3, "honey": 4, "wool": 1, "cheese": 1})
    market, before = Market(one, two), (one.wealth, two.wealth)
    print(f"A market in the snow. {one}, {two}.", flush=True)
    launched = frameshard.launch(resolve(args.model), device=args.device, n_parallel=2, log=subprocess.DEVNULL)
    async with launched as client:
        one.news.put_nowait(f"Tam waves at you. {one}, {two}.")
        await asyncio.gather(live(client, market, one), live(client, market, two), dragon(client, market))
    for trader, worth in zip((one, two), before, strict=True):
        print(f"{trader}. That is worth {trader.wealth} to {trader.name}, and was {worth}.")
    print(", ".join(f"{count} {what}" for what, count in market.done.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="path or name of a model")
    parser.add_argument("--device", default="emulated", help="auto: the best GPU")
    try:
        asyncio.run(play(parser.parse_args()))
    except frameshard.FrameshardError as error:
        sys.exit(f"{error.name}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of the output has ended, as in "main.py | head". Python's flush at exit must not fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
