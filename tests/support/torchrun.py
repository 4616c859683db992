"""``torchrun``, with a quick end."""

from torch.distributed.run import main

from support.ending import end

main()
end()
