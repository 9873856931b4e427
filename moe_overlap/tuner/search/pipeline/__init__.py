"""Stages together: how layers and devices are divided among them, and where they stand in the cluster.

- `mist_milp.py`: every stage takes a number of layers, a mesh and a point of its frontier. `stage_options.py` holds the problem
  and a bound of it.
- `chain_labels.py`: the same choice without a solver, by labels that no others beat.
- `per_stage.py`: stages of one layout that decide for themselves; `shares.py`: answers of several processes as one.
- `sub_meshes.py`: stages on sub-meshes of unlike size.
- `stage_cuts.py`: where to cut a model, and a sub-mesh for each stage, from one cost per stage.
- `thresholds.py`: the smallest slowest stage and the smallest sum at once, which both need.
- `placement.py`: the sub-meshes of a cluster, and where those of a pipeline stand.
- `operator_clusters.py`: layers for models that have none.
"""
