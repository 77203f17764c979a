"""A memory network answers questions about a story: attention hops from one fact to the next.

    python examples/memory_network.py [--picture hops.svg]

An end-to-end memory network (Sukhbaatar et al. 2015, arXiv 1503.08895, section 2) keeps each sentence x_i of a story as
two vectors, one to be found by and one to be read. The question u reads by attention, K times:

    m_i = Σ_w A x_iw + T_A(i),    c_i = Σ_w C x_iw + T_C(i),    o = Σ_i softmax_i(u · m_i) c_i,    u ← u + o
    answer = softmax(C u), and the C of one hop is the A of the next ("adjacent"), so that K hops have K + 1 embeddings.

T is learned, by the place of a sentence in the story. Attention is `regard.attention` with the score u · m, unscaled.

The stories are generated here: persons take things and walk, in the manner of the second task of bAbI; a thing is where
the person is who has it. "Mary took the milk. John went to the office. Mary went to the garden. Where is the milk?"
needs two facts, and only the first shares a word with the question. Each story has 8 sentences, of 3 persons, 3 things
and 5 places, and a thing is taken once.

Printed: answers right on 1,000 other stories (standard error about 1.5 %) with one, two and three hops, beside the
place that was named last and the answer by chance; and of the three hops the weight on the sentence in which the thing
was taken and on the one in which its owner walked last, hop by hop: that the model finds the second fact by the first.
"""

from __future__ import annotations

import argparse
from itertools import pairwise

import torch
from torch import Tensor, nn

import regard

PERSONS, THINGS = ["Mary", "John", "Anna"], ["milk", "ball", "book"]
PLACES = ["garden", "office", "kitchen", "hall", "cellar"]
WORDS = ["took", "went", "where", *PERSONS, *THINGS, *PLACES]
NUMBER = {word: number for number, word in enumerate(WORDS)}
SENTENCES, DIM = 8, 32


class Stories:
    """Stories (count, sentences, 3 words), questions (count, 2 words), answers (count,) as numbers of places.

    taken and walked: which sentence says who took the thing, and which says where that person went last.
    """

    def __init__(self, count: int, draw: torch.Generator) -> None:
        made = [self._one(draw) for _ in range(count)]
        self.sentences, self.questions, self.answers, self.taken, self.walked = (
            torch.tensor(column) for column in zip(*made, strict=True)
        )

    def __len__(self) -> int:
        return len(self.answers)

    @staticmethod
    def _one(draw: torch.Generator) -> tuple[list[list[int]], list[int], int, int, int]:
        def pick(count: int) -> int:
            return int(torch.randint(count, (), generator=draw))

        free, story, takers, last = list(THINGS), [], {}, {}
        while len(story) < SENTENCES:
            person = PERSONS[pick(len(PERSONS))]
            if free and len(story) < SENTENCES - 2 and pick(3) == 0:
                thing = free.pop(pick(len(free)))
                takers[thing] = person, len(story)
                story.append([person, "took", thing])
            else:
                place = PLACES[pick(len(PLACES))]
                last[person] = place, len(story)
                story.append([person, "went", place])
        asked = [thing for thing, (person, _) in takers.items() if person in last]
        if not asked:
            return Stories._one(draw)
        thing = asked[pick(len(asked))]
        person, taken = takers[thing]
        place, walked = last[person]
        numbers = [[NUMBER[word] for word in sentence] for sentence in story]
        return numbers, [NUMBER["where"], NUMBER[thing]], PLACES.index(place), taken, walked


class MemoryNetwork(nn.Module):
    """K hops over the sentences of a story: logits of the places (batch, places)."""

    def __init__(self, hops: int) -> None:
        super().__init__()
        self.words = nn.ParameterList(torch.randn(len(WORDS), DIM) * 0.1 for _ in range(hops + 1))
        self.times = nn.ParameterList(torch.randn(SENTENCES, DIM) * 0.1 for _ in range(hops + 1))

    def memories(self, sentences: Tensor) -> list[Tensor]:
        """The vectors (batch, sentences, dim) of each embedding: keys of one hop, and values of the hop before."""
        return [table[sentences].sum(2) + time for table, time in zip(self.words, self.times, strict=True)]

    def forward(self, sentences: Tensor, questions: Tensor) -> Tensor:
        memories = self.memories(sentences)
        state = self.words[0][questions].sum(1, keepdim=True)  # u, (batch, 1, dim)
        for keys, values in pairwise(memories):
            state = state + regard.attention(state, keys, values, score=regard.scores.Dot())
        return self.answers(state)

    def weights(self, sentences: Tensor, questions: Tensor) -> Tensor:
        """Those of each hop, (batch, hops, sentences)."""
        memories, seen = self.memories(sentences), []
        state, lens = self.words[0][questions].sum(1, keepdim=True), regard.lenses.Weights()
        for keys, values in pairwise(memories):
            seen.append(regard.observe(state, keys, values, lens, score=regard.scores.Dot()))
            state = state + seen[-1].output
        return torch.cat([hop[lens] for hop in seen], 1)

    def answers(self, state: Tensor) -> Tensor:
        """The last embedding is the output layer as well."""
        return (state @ self.words[-1][-len(PLACES) :].mT)[:, 0]


def train(model: MemoryNetwork, stories: Stories, updates: int) -> None:
    """Adam on random batches of 100."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(updates):
        batch = torch.randint(len(stories), (100,))
        logits = model(stories.sentences[batch], stories.questions[batch])
        loss = nn.functional.cross_entropy(logits, stories.answers[batch])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 40.0)
        optimizer.step()


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train with one, two and three hops, print the figures and return them."""
    parser = argparse.ArgumentParser(description="Questions about stories, by a memory network.")
    parser.add_argument("--picture", help="draw the weights of each hop on one story here: .png, .svg or .pdf")
    parser.add_argument("--updates", type=int, default=1000, help="of each model")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(0)
    stories, unseen = Stories(5000, draw), Stories(1000, draw)
    places = torch.where(
        unseen.sentences[..., 2] >= NUMBER[PLACES[0]], unseen.sentences[..., 2] - NUMBER[PLACES[0]], -1
    )
    latest = torch.stack([story[story >= 0][-1] for story in places])
    figures = {"chance": 1 / len(PLACES), "place named last": float((latest == unseen.answers).float().mean())}
    weights = torch.empty(0)
    for hops in (1, 2, 3):
        model = MemoryNetwork(hops)
        train(model, stories, options.updates)
        with torch.no_grad():
            logits = model(unseen.sentences, unseen.questions)
            weights = model.weights(unseen.sentences, unseen.questions)
        figures[f"hops {hops}"] = float((logits.argmax(1) == unseen.answers).float().mean())
    for name, figure in figures.items():
        print(f"{name:18}{figure:8.1%}")
    print("hop   on who took it   on where that person went last")
    for hop in range(3):
        for name, places in (("taken", unseen.taken), ("walked", unseen.walked)):
            figures[f"{name}, hop {hop + 1}"] = float(weights[:, hop].gather(1, places[:, None]).mean())
        print(f"{hop + 1:3}{figures[f'taken, hop {hop + 1}']:17.2f}{figures[f'walked, hop {hop + 1}']:33.2f}")
    if options.picture:
        columns = [" ".join(WORDS[int(word)] for word in sentence) for sentence in unseen.sentences[0]]
        title = f"Where is the {WORDS[int(unseen.questions[0, 1])]}?"
        figure = regard.plots.heatmap(weights[0], [f"hop {number + 1}" for number in range(3)], columns, title=title)
        regard.plots.save(figure, options.picture)
    return figures


if __name__ == "__main__":
    main()
