"""The distributed MoE layer: plan, peer groups, pipelines."""
