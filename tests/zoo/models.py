"""All models of the zoo, by name."""

from tests.zoo.diffusion_models import find_diffusion_models
from tests.zoo.hard_models import find_hard_models
from tests.zoo.science_models import find_science_models
from tests.zoo.transformers_models import find_transformers_models
from tests.zoo.vision_models import find_vision_models
from tests.zoo.zoo_model import ZooModel


def find_models() -> dict[str, ZooModel]:
    """By `library, name`."""
    return {
        **find_hard_models(),
        **find_diffusion_models(),
        **find_science_models(),
        **find_vision_models(),
        **find_transformers_models(),
    }
