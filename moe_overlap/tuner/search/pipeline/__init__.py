"""Searches over the stages of a pipeline: the division of layers and devices among them, and their places in the cluster.

- `mist_milp.py`: layers, mesh and frontier point of every stage, by an integer program. `stage_options.py` has the problem and a
  lower bound.
- `chain_labels.py`: the same choice without a solver, by undominated labels.
- `per_stage.py`: stages of one layout, each with its own layers and memory choice; `shares.py` joins the answers of processes.
- `sub_meshes.py`: stages on sub-meshes of different size.
- `stage_cuts.py`: the cuts of a model and a sub-mesh per stage, from one cost per stage.
- `thresholds.py`: the minimum of a sum plus a weighted maximum, for both of them.
- `placement.py`: the sub-meshes of a cluster, and the places of a pipeline's.
- `operator_clusters.py`: clusters of operators as layers.
"""
