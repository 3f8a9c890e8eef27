"""Pipelines: phases between barriers, written once for every group and executor.

A pipeline is a module here, named in `config.PIPELINES`, with a constant PIPELINE.
"""
