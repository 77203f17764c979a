"""Run the demonstration: `torchrun --nproc-per-node 4 -m regard.ring.demo`."""

from . import main

main()
