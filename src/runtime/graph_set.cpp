// SPDX-License-Identifier: Apache-2.0
#include "runtime/graph_set.h"

#include <algorithm>
#include <utility>

namespace ikbo::runtime {
namespace {

using Place = RunSizes::Place;

// What a run takes besides its kernels and their launches, roughly: copies, waiting.
constexpr double kLatencyUs = 100;

// Where the GPU is still at work for as long again as the launches took, it never waited for them.
bool hides_launches(const PlainRun& run) { return run.run_us > 2 * run.launch_us + kLatencyUs; }

// Of the sizes that launches may slow down; the others, and those beyond them, are not run.
std::vector<std::optional<PlainRun>> measure(const RunSizes& sizes, GraphMaker& maker) {
  std::vector<std::optional<PlainRun>> runs(sizes.size());
  for (std::size_t u = 0; u < sizes.num_user_steps(); ++u) {
    for (std::size_t c = 0; c < sizes.num_candidate_steps(); ++c) {
      const PlainRun run = maker.run_plain(sizes.at(u, c));
      if (hides_launches(run) && c == 0) {
        return runs;
      }
      if (hides_launches(run)) {
        break;
      }
      runs[sizes.index({u, c})] = run;
    }
  }
  return runs;
}

// The largest first: smaller graphs then find room in the memory of larger ones.
template <typename Visit>
void visit_descending(const RunSizes& sizes, const Visit& visit) {
  for (std::size_t u = sizes.num_user_steps(); u-- > 0;) {
    for (std::size_t c = sizes.num_candidate_steps(); c-- > 0;) {
      visit(Place{u, c});
    }
  }
}

}  // namespace

GraphSet::GraphSet(GraphChoice choice)
    : choice_(std::move(choice)), graphs_(choice_.sizes.size()) {}

GraphSet GraphSet::choose(const RunSizes& sizes, std::size_t max_bytes, GraphMaker& maker) {
  const std::vector<std::optional<PlainRun>> runs = measure(sizes, maker);
  GraphChoice choice{sizes, std::vector<bool>(sizes.size()), 0};
  for (std::size_t i = 0; i < runs.size(); ++i) {
    choice.has_graph[i] = runs[i].has_value() && runs[i]->bytes <= max_bytes;
  }
  GraphSet set = make(choice, maker);
  visit_descending(sizes, [&](Place place) {
    const std::size_t i = sizes.index(place);
    if (set.graphs_[i] == nullptr) {
      return;
    }
    // Runs of the step below have graphs of their own: one that is barely larger gains the least.
    const Place below = {place.user_step - std::min<std::size_t>(place.user_step, 1),
                         place.candidate_step - std::min<std::size_t>(place.candidate_step, 1)};
    const std::optional<PlainRun>& emptiest = runs[sizes.index(below)];
    if (emptiest.has_value() && maker.replay_us(*set.graphs_[i]) < emptiest->run_us) {
      set.choice_.bytes = std::max(set.choice_.bytes, runs[i]->bytes);
    } else {
      set.choice_.has_graph[i] = false;
      set.graphs_[i] = nullptr;
    }
  });
  return set;
}

GraphSet GraphSet::make(const GraphChoice& choice, GraphMaker& maker) {
  GraphSet set(choice);
  const auto visit_chosen = [&](const auto& visit) {
    visit_descending(choice.sizes, [&](Place place) {
      if (choice.has_graph[choice.sizes.index(place)]) {
        visit(place, choice.sizes.at(place.user_step, place.candidate_step));
      }
    });
  };
  visit_chosen([&](Place, RunSize size) { maker.make_room(size); });
  visit_chosen([&](Place, RunSize size) { maker.warm_up(size); });
  visit_chosen([&](Place place, RunSize size) {
    set.graphs_[choice.sizes.index(place)] = maker.capture(size);
  });
  return set;
}

GraphSet::Found GraphSet::find(RunSize run) const {
  const std::optional<Place> place = choice_.sizes.find(run);
  if (!place.has_value()) {
    return {};
  }
  return {choice_.sizes.at(place->user_step, place->candidate_step),
          graphs_[choice_.sizes.index(*place)].get()};
}

int GraphSet::num_graphs() const {
  return static_cast<int>(std::ranges::count(choice_.has_graph, true));
}

}  // namespace ikbo::runtime
