"""Training of Medusa heads: small layers on a frozen model's last hidden state that guess the tokens further ahead.

    states.py    hidden states of texts and of answers, as the engine computes them
    texts.py     what is trained on, what is measured on, where heads go
    loss.py      how far the heads' guesses are from what the model itself would say
    train.py     training, from a model to heads in a folder
    measure.py   tokens per step that heads give, on answers of the model

The heads themselves, their files and their tree stand with the drafter that uses them, in `runtime/drafters/`.
"""
