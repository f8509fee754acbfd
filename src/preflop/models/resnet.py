"""ResNet with bottlenecks: convolutions, batch norm, in-place ReLU."""

from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from preflop.models.catalog import ModelFacts
from preflop.models.layers import Conv2d, Linear
from preflop.models.loss import Output, class_loss

# Channels of a bottleneck's output over those inside it (He et al. 2015, table 1).
EXPANSION = 4


def _convolution(inputs: int, outputs: int, *, size: int, stride: int) -> nn.Conv2d:
    return Conv2d(inputs, outputs, kernel_size=size, stride=stride, padding=size // 2, bias=False)


class Bottleneck(nn.Module):
    """Narrow, convolve (here the stride), widen; added to a shortcut. Only images pass between them."""

    def __init__(self, inputs: int, outputs: int, *, stride: int, eps: float) -> None:
        super().__init__()
        inside = outputs // EXPANSION
        self.narrow = _convolution(inputs, inside, size=1, stride=1)
        self.narrow_norm = nn.BatchNorm2d(inside, eps=eps)
        self.convolve = _convolution(inside, inside, size=3, stride=stride)
        self.convolve_norm = nn.BatchNorm2d(inside, eps=eps)
        self.widen = _convolution(inside, outputs, size=1, stride=1)
        self.widen_norm = nn.BatchNorm2d(outputs, eps=eps)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                _convolution(inputs, outputs, size=1, stride=stride),
                nn.BatchNorm2d(outputs, eps=eps),
            )
        self.relu = nn.ReLU(inplace=True)

    def forward(
        self, images: Float[Tensor, "batch inputs height width"]
    ) -> Float[Tensor, "batch outputs rows columns"]:
        """Feature maps, `stride` times smaller in each direction."""
        branch = self.relu(self.narrow_norm(self.narrow(images)))
        branch = self.relu(self.convolve_norm(self.convolve(branch)))
        branch = self.widen_norm(self.widen(branch))
        branch += self.shortcut(images)
        return self.relu(branch)


class Stem(nn.Module):
    """The first convolution and pooling: a quarter of the image's height and width."""

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__()
        channels, stem = facts.needed("channels"), facts.needed("stem")
        self.convolve = _convolution(channels, stem, size=7, stride=2)
        self.norm = nn.BatchNorm2d(stem, eps=facts.norm_eps)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)

    def forward(
        self, images: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch stem rows columns"]:
        """The first feature maps, in the weights' dtype."""
        images = images.to(self.convolve.weight.dtype)
        return self.pool(self.relu(self.norm(self.convolve(images))))


def _bottlenecks(facts: ModelFacts) -> list[Bottleneck]:
    """All bottlenecks, stage after stage; a stage doubles the channels and, but for the first, halves
    the image in its first bottleneck."""
    blocks = []
    inputs = facts.needed("stem")
    outputs = facts.hidden // 2 ** (len(facts.depths) - 1)
    for stage, depth in enumerate(facts.depths):
        for index in range(depth):
            stride = 2 if stage > 0 and index == 0 else 1
            blocks.append(Bottleneck(inputs, outputs, stride=stride, eps=facts.norm_eps))
            inputs = outputs
        outputs *= 2
    return blocks


class ResNet(nn.Module):
    """A residual network with a linear classifier on the averaged last feature maps.

    Source: He et al. 2015, arXiv:1512.03385, as torchvision and transformers build it: the stride in the
    3 x 3 convolution. ReLU is in place as in torchvision; `blocks` are not all equal.
    """

    residual_projections = ()

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__()
        self.facts = facts
        self.stem = Stem(facts)
        self.blocks = nn.ModuleList(_bottlenecks(facts))
        self.pool = nn.AdaptiveAvgPool2d((1, 1))
        self.classifier = Linear(facts.hidden, facts.classes)

    def forward(
        self,
        images: Float[Tensor, "batch channels height width"],
        labels: Int[Tensor, " batch"] | None = None,  # type: ignore[name-defined]
    ) -> Output:
        """Logits of the classes, and the loss against the labels."""
        features = self.stem(images)
        for block in self.blocks:
            features = block(features)
        pooled = rearrange(self.pool(features), "batch hidden 1 1 -> batch hidden")
        logits = self.classifier(pooled)
        return Output(logits, None if labels is None else class_loss(logits, labels))
