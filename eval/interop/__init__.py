"""Our checkpoints in other engines: do they load, and do they compute what the checkpoint means?

The runs are in docs/reference/interop.md.

checkpoints   what is tried: every recipe, and what `quantkit convert` makes of them
adapters      one interface for engines; transformers is here, vLLM in eval/peers/vllm_load.py
compare       log-probabilities there and here, on the same tokens
attempt       one checkpoint after the other in a process that may die or hang
rows, table   eval/results/interop.csv, and the page that shows it
speed_*       ours and another engine side by side on the same folder (eval/peers/vllm_bench.py)
"""
