from quantkit.medusa.heads import MedusaHeads as MedusaHeads
from quantkit.medusa.heads import Target as Target
from quantkit.medusa.heads import load_heads as load_heads
