"""Vertical gradient accumulation: all micro-batches pass a block before any of them passes the next.

In the usual order each micro-batch brings every block's parameters twice, and takes its gradient away. Here they come twice for all
micro-batches, and the gradient leaves once, summed. The model's own forward runs once for each micro-batch, in a thread of its own that stops
where it calls a block; one of them runs at a time (micro_batch.py). A block is called for all micro-batches that have come to it, without a
graph, and what is kept of a call are its inputs (calls.py). Backward goes from the last block to the first: it calls the block once more for each
micro-batch, with the same random numbers, and goes on through what the model computes between blocks (schedule.py).

The additions are those of the usual loop with activation checkpointing, in the same order, but for parameters that the model uses in
several places at once (tied embeddings): their parts are added up in fp32 here, and in their own precision there.

Source: GreedySnake, arXiv 2512.17570, over models written for it.
"""
