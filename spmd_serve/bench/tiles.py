import sys, itertools, multiprocessing as mp, time, torch
from torch.nn import functional as F
from spmd_serve.kernels.gpu.tiles import TileConfig as C, tile_linear, add_norm_parts_
from spmd_serve.kernels.norm import rms_norm
from spmd_serve.kernels.activation import gated_activation

L = 28


def shapes(name):
    H, QKV, O, I = {"q06": (1024, 4096, 2048, 3072), "q14": (5120, 7168, 5120, 17408)}[name]
    return {"qkv": (QKV, H, None), "o": (H, O, None), "gu": (2 * I, H, "silu"), "down": (H, I, None)}


def configs(name):
    out = []
    for layer, (n, k, act) in shapes(name).items():
        feats = n // (2 if act else 1)
        if name == "q06":
            opts = {
                "qkv": itertools.product((16, 32, 64), (64, 128, 256), (1,), (4,), (3, 4)),
                "gu": itertools.product((16, 32), (64, 128), (1,), (4, 8), (3, 4)),
                "o": itertools.product((16, 32, 64), (64, 128), (1, 2, 4, 8), (4,), (3, 4)),
                "down": itertools.product((16, 32, 64), (64, 128), (1, 2, 3, 4, 6, 8), (4,), (3, 4)),
            }[layer]
        else:
            opts = {
                "qkv": itertools.product((32, 64), (64, 128), (1, 2), (4,), (4, 5)),
                "gu": itertools.product((32, 64), (64, 128), (1,), (4, 8), (3, 4)),
                "o": itertools.product((32, 64), (64, 128), (1, 2, 4), (4,), (4, 5)),
                "down": itertools.product((32, 64, 128), (64, 128), (2, 4, 8), (4,), (4, 5)),
            }[layer]
        for r, b, s, w, st in opts:
            if feats % r or k % (s * b):
                continue
            progs = feats // r * s
            if progs < 48 or progs > 2200:
                continue
            smem = st * b * 2 * (64 + r * (2 if act else 1))
            if smem > 225 * 1024:
                continue
            out.append((layer, C(r, b, s, w, st)))
    return out


def compile_some(job):
    name, part, parts = job
    sh = shapes(name)
    bad = []
    for layer, c in configs(name)[part::parts]:
        n, k, act = sh[layer]
        x = torch.zeros(64, k, device="cuda", dtype=torch.bfloat16)
        w = torch.zeros(n, k, device="cuda", dtype=torch.bfloat16)
        try:
            tile_linear(x, w, None, act, c)
            torch.cuda.synchronize()
        except Exception as e:
            bad.append((layer, c, type(e).__name__ + str(e)[:80]))
    return bad


def timed(f, inner):
    f()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        f()
    best = 1e9
    for _ in range(12):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        g.replay()
        b.record()
        b.synchronize()
        best = min(best, a.elapsed_time(b) * 1000 / inner)
    return best


def main(name):
    t0 = time.time()
    layers = L if name == "q06" else 4
    with mp.get_context("spawn").Pool(14) as pool:
        for bad in pool.map(compile_some, [(name, i, 14) for i in range(14)]):
            for b in bad:
                print("BAD", b)
    print(f"compiled {len(configs(name))} in {time.time() - t0:.0f} s", flush=True)
    torch.manual_seed(0)
    sh = shapes(name)
    W = {
        l: [(torch.randn(n, k, device="cuda") / k**0.5).bfloat16() for _ in range(layers)]
        for l, (n, k, a) in sh.items()
    }
    H = sh["qkv"][1]
    scale = (torch.rand(H, device="cuda") + 0.5).bfloat16()
    best = {}
    T = 64
    for l, (n, k, act) in sh.items():
        x = torch.randn(T, k, device="cuda").bfloat16()
        res = torch.randn(T, n, device="cuda").bfloat16()
        ref = x.float() @ W[l][0].float().T
        if act:
            ref = F.silu(ref[:, : n // 2]) * ref[:, n // 2 :]

        def lib():
            for w in W[l]:
                if act:
                    gated_activation(F.linear(rms_norm(x, scale, 1e-6), w), act)
                elif l == "qkv":
                    F.linear(rms_norm(x, scale, 1e-6), w)
                else:
                    res.addmm_(x, w.t())

        rows = []
        for layer, c in configs(name):
            if layer != l:
                continue
            try:
                got = tile_linear(x, W[l][0], None, act, c)
                got = got.float() if c.splits == 1 else got.sum(0)
                err = float((got - ref).norm() / ref.norm())

                def mine():
                    for w in W[l]:
                        y = tile_linear(x, w, None, act, c)
                        if l in ("o", "down"):
                            add_norm_parts_(y if c.splits > 1 else y[None], res, scale, 1e-6)

                rows.append((timed(mine, layers), c, err))
            except Exception as e:
                print("BAD", l, c, str(e)[:100])
        rows.sort(key=lambda r: r[0])
        best[l] = rows[0][1]
        print(
            f"{name} {l}: library {timed(lib, layers):.2f} us; "
            + "; ".join(f"{t:.2f} {c.rows},{c.block},{c.splits},{c.warps},{c.stages} ({e:.0e})" for t, c, e in rows[:6])
            + f" ... {rows[-1][0]:.2f}",
            flush=True,
        )
    for T in (24, 32, 48, 64):
        x0 = torch.randn(T, H, device="cuda").bfloat16()
        O = sh["o"][1]

        def lib():
            s = x0
            for i in range(layers):
                q = F.linear(rms_norm(s, scale, 1e-6), W["qkv"][i])
                s = s.addmm_(q[:, :O], W["o"][i].t())
                h = gated_activation(F.linear(rms_norm(s, scale, 1e-6), W["gu"][i]), "silu")
                s = s.addmm_(h, W["down"][i].t())

        def mine():
            s = x0
            nrm = rms_norm(s, scale, 1e-6)
            for i in range(layers):
                q = tile_linear(nrm, W["qkv"][i], None, None, best["qkv"])
                p = tile_linear(q[:, :O], W["o"][i], None, None, best["o"])
                nrm = add_norm_parts_(p if p.dim() == 3 else p[None], s, scale, 1e-6)
                h = tile_linear(nrm, W["gu"][i], None, "silu", best["gu"])
                p = tile_linear(h, W["down"][i], None, None, best["down"])
                nrm = add_norm_parts_(p if p.dim() == 3 else p[None], s, scale, 1e-6)

        print(f"{name} layer T={T}: library {timed(lib, layers):.2f} us, tiles {timed(mine, layers):.2f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
