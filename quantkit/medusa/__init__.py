"""Medusa heads: small layers on a frozen model's last hidden state that guess the tokens behind the next one.

    heads.py     the heads themselves, and their files; needs no training code
    tree.py      which combinations of guesses one step verifies
    states.py    hidden states of texts and of answers, as the engine computes them
    loss.py      how far the heads' guesses are from what the model itself would say
    train.py     training, from a model to heads in a folder
    measure.py   tokens per step that heads give, on answers of the model

The drafter that uses them while serving is `quantkit/runtime/speculation/medusa.py`. It imports `heads.py` alone;
`states.py`, `train.py` and `measure.py` import the engine, so nothing is imported here.
"""
