import sys,time; sys.path.insert(0,"/work/wt/half")
import pytest,torch,numpy as np
from pathlib import Path
import tests.learner.update.test_half_precision as T
from learner.update.learner import Learner
from learner.update import learner as L
from protocol.messages import LearnerState
from tests.support.learning.groups import learn
torch.set_num_threads(2)
import tempfile
def test_x(tiny_config, monkeypatch):
    import os
    heads=int(os.environ.get("HEADS","2")); side=int(os.environ.get("SIDE","32")); ch=int(os.environ.get("CH","4"))
    folder=T.written(Path(tempfile.mkdtemp()),heads=heads,side=side,channels=ch)
    for size in (1e-3,1e-2):
        ref=None
        for dtype in ("float32","bfloat16","float16","old"):
            dt="float16" if dtype=="old" else dtype
            c=T.configured(tiny_config,folder,dt)
            learner=Learner(c)
            if ref is None:
                ad=T.an_adapter(learner,size); groups=T.scored_groups(c,ad)
            if dtype=="old":
                monkeypatch.setattr(Learner,"_divisor",lambda self,b:self._all_pairs(b))
            learner.restore(LearnerState(iteration=0,adapter=ad,optimizer={}))
            seen={}
            clip=L.clip_grad_norm_
            def w(ps,most,learner=learner,seen=seen):
                seen.update({n:p.grad.clone() for n,p in learner._lora.parameters.items() if p.grad is not None})
                return clip(list(ps),most)
            monkeypatch.setattr(L,"clip_grad_norm_",w)
            t=time.time(); m=learn(c,groups,learner); t=time.time()-t
            monkeypatch.undo()
            if ref is None: ref=seen
            out=[]
            for ab in ("lora_A","lora_B"):
                a=torch.cat([ref[n].flatten() for n in ref if ab in n]); b=torch.cat([seen[n].flatten() for n in ref if ab in n])
                out.append((round(((a-b).norm()/a.norm()).item(),4), round((b==0).float().mean().item(),3)))
            print(size,dtype,out,m.get("train/zero_gradients"),m["train/grad_norm"],round(t,2), learner._scaler.get_scale())
