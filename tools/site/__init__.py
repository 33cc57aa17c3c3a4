"""The course as pages of HTML, in build/site: to look at before anything is installed, or to publish.

Drops with their stored outputs, slides, cards, the cheat sheet, the documents. The pages fetch nothing from a
network, so they also open from a folder. Formulas are plain text, as in the drops. The answer to a prediction
is folded until the reader has chosen. The explorers of schedules and memory work without a kernel, from
frames that were computed before.
"""
