"""Engine `fsdp`: PyTorch's own FSDP2 (`torch.distributed.fsdp.fully_shard`) on our mesh."""
