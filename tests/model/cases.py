"""The requests whose texts are compared with transformers."""

from __future__ import annotations

from support.reference import Case

_STORY = (
    "The lighthouse stood on the northern cliff, and its keeper had written down the weather every evening for thirty "
    "years: wind, waves, the colour of the sky, the ships that passed and the birds that rested on the railing. "
)

# More than 600 tokens: several chunks with the servers' --max-batch-tokens.
LONG = Case("Summary of the keeper's diary. " + _STORY * 14 + "One night in November the keeper", 10)

SOLO = (
    Case("The capital of France is", 10),
    Case("def fibonacci(n):\n    ", 10),
    Case("1, 2, 3, 5, 8, 13, 21,", 10),
    Case("Les trois plus grandes villes de l'été: 東京, 🌍 et", 12),
    Case((("system", "You answer briefly."), ("user", "Which planet is the largest one?")), 10),
    LONG,
)

# Together with SOLO 16 prompts of 1 to some 680 tokens.
OTHERS = (
    Case("A"),
    Case("Water boils at", 9),
    Case("Once upon a time there was a fox who", 24),
    Case(_STORY, 12),
    Case("SELECT name FROM", 5),
    Case((("user", "Hi"),), 20),
    Case("To be, or not to be, that is", 1),
    Case(_STORY * 4, 8),
    Case("The chemical symbol of gold is", 13),
    Case("Dear Sir or Madam,\n\n", 18),
)

SEEDED = (
    Case("My favourite colour is", 14, temperature=0.8, seed=42),
    Case((("user", "Tell me a joke."),), 14, temperature=1.0, seed=7),
    Case("In the year 2050", 14, temperature=1.3, seed=2**62 + 1, top_k=40, top_p=0.9),
    Case("My favourite colour is", 14, temperature=1.0, seed=43, top_p=0.8),
)

NEIGHBOURS = tuple(Case(f"Number {i} is", 12 + i, temperature=1.0) for i in range(8))
