#include "weights.h"

#include "ggml-backend.h"

namespace fsd {

void Weights::add(const ggml_tensor *t) {
    if (index_.emplace(t->data, (int)all.size()).second) {
        Weight w;
        w.name = t->name;
        w.shape = *t;
        w.host = (const char *)t->data;
        w.bytes = ggml_nbytes(t);
        all.push_back(std::move(w));
    }
}

void Weights::clear() {
    all.clear();
    index_.clear();
}

const Weight *Weights::of(const ggml_tensor *t) const {
    const auto it = index_.find(root_of(t)->data);
    return it == index_.end() ? nullptr : &all[it->second];
}

bool Weights::lay_out(ggml_backend_buffer_type_t buft, std::string &why) {
    if (all.empty()) {
        why = "the model has no weights on this device";
        return false;
    }
    std::vector<int> order(all.size());
    std::vector<LadderPlace> places(all.size());
    n_shards = std::max(1u, n_named_shards);
    for (size_t i = 0; i < all.size(); i++) {
        const auto named = ladder.find(all[i].name);
        places[i] = named == ladder.end() ? LadderPlace{n_shards, ladder.size() + i} : named->second;
        order[i] = (int)i;
    }
    std::sort(order.begin(), order.end(), [&](int a, int b) {
        return std::make_pair(places[a].shard, places[a].position) <
               std::make_pair(places[b].shard, places[b].position);
    });
    n_shards = std::max(n_shards, places[order.back()].shard + 1);
    std::vector<WeightShape> shapes;
    for (int i : order) {
        Weight &w = all[i];
        w.shard = places[i].shard;
        WeightShape shape = {w.name, w.shard, w.shape.type, {}};
        std::copy_n(w.shape.ne, GGML_MAX_DIMS, shape.ne);
        if (ggml_backend_buft_get_alloc_size(buft, &w.shape) > device_bytes(shape.type, shape.ne[0], w.bytes)) {
            why = "the device wants more memory for " + w.name + " than its layout has";
            return false;
        }
        shapes.push_back(std::move(shape));
    }
    layout = fsd::lay_out(shapes, sizes, n_shards);
    for (size_t i = 0; i < order.size(); i++) {
        all[order[i]].place = layout.weights[i];
    }
    for (Piece &p : layout.pieces) {
        p.tensor = order[p.tensor];
    }
    return true;
}

} // namespace fsd
