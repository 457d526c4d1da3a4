"""Your own PyG module, trained on two ranks of this machine; its weights come back into it."""

import torch
from safetensors.torch import load_file
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

import gnnplan


class MyGNN(torch.nn.Module):
    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(features, hidden), SAGEConv(hidden, classes)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


if __name__ == "__main__":  # ranks are processes of their own
    torch.manual_seed(0)
    y = torch.randint(3, (300,))
    links = torch.randint(300, (2, 4000))
    edges = links[:, (y[links[0]] == y[links[1]]) | (torch.rand(4000) < 0.2)]
    data = Data(x=torch.randn(300, 16) + y[:, None], edge_index=edges, y=y)

    model = MyGNN(16, 32, 3)
    plan = gnnplan.plan(data, ranks=2, model=model, exact=True, lr=0.01)
    run = plan.run(epochs=20)
    print(run)

    model.load_state_dict(load_file(run.weights))
    scores = model(data.x, data.edge_index).argmax(dim=1)
    print(f"the module labels {(scores == y).float().mean():.0%} of vertices rightly")
