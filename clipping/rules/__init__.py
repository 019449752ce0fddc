"""Rules: the per-sample gradient, norm and clipped sum of each operation that reads a parameter.

Functions take:
    gradient: (parameter, class of the rule, further arguments), a rule that `rules.base.made` creates later.
    layer: a `rules.recurrent.Layer`.
"""
