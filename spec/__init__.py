"""The mini-spec as data and text: the op table, the lists of variants and deviations, one chapter per op."""
