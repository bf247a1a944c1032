"""A process of the fixture `ranks`: one of several ranks of torch.distributed, that call functions of test files."""

import datetime
import json
import runpy
import sys

import torch
import torch.distributed as dist

torch.set_num_threads(1)
answers, sys.stdout = sys.stdout, sys.stderr
for line in sys.stdin:
    file, name, count, where, arguments = json.loads(line)
    rank, timeout = int(sys.argv[1]), datetime.timedelta(seconds=300)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=count, timeout=timeout)
    runpy.run_path(file)[name](rank, count, *arguments)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    print("done", file=answers, flush=True)
