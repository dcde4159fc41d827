// SPDX-License-Identifier: Apache-2.0
// The metrics as their readers get them: Prometheus text, and the JSON of a model's statistics.
#include <utility>

#include "server/json_writer.h"
#include "server/metrics.h"
#include "server/prometheus_text.h"

namespace ikbo::server {
namespace {

struct HistogramInfo {
  const Histogram ModelMetrics::* member;
  std::string_view name;
  std::string_view help;
};

constexpr HistogramInfo kHistograms[] = {
    {&ModelMetrics::request_seconds, "ikbo_request_seconds",
     "Time from a request's first byte to its finished reply."},
    {&ModelMetrics::overhead_seconds, "ikbo_overhead_seconds",
     "Time from a request's last byte to the first of its answer, without queue and model."},
    {&ModelMetrics::queue_seconds, "ikbo_queue_seconds",
     "Time from a request's arrival in the queue to the start of its run."},
    {&ModelMetrics::run_seconds, "ikbo_run_seconds",
     "Time of one run: merging, the model, splitting."},
    {&ModelMetrics::batch_requests, "ikbo_batch_requests", "Requests in one run."},
    {&ModelMetrics::batch_users, "ikbo_batch_users", "Users in one run."},
    {&ModelMetrics::batch_candidates, "ikbo_batch_candidates", "Candidates in one run."},
    {&ModelMetrics::batch_ratio, "ikbo_batch_ratio", "Candidates per user in one run."},
};

struct CounterInfo {
  const std::atomic<std::uint64_t> ModelMetrics::* member;
  std::string_view name;
  std::string_view help;
};

constexpr CounterInfo kCounters[] = {
    {&ModelMetrics::shared_users, "ikbo_shared_users_total",
     "Requests whose user's rows came with another request of their run."},
    {&ModelMetrics::split_requests, "ikbo_split_requests_total",
     "Requests that were split over several runs."},
};

struct CostInfo {
  const std::atomic<double> ModelMetrics::* member;
  std::string_view name;
  std::string_view help;
};

constexpr CostInfo kCosts[] = {
    {&ModelMetrics::flops, "ikbo_flops_total", "FLOPs of the runs, by the compilation spec."},
    {&ModelMetrics::replicated_flops, "ikbo_replicated_flops_total",
     "FLOPs of the same runs had users been replicated to candidates."},
    {&ModelMetrics::bytes, "ikbo_bytes_total",
     "Bytes that the operators of the runs read and wrote, by the compilation spec."},
    {&ModelMetrics::replicated_bytes, "ikbo_replicated_bytes_total",
     "Bytes of the same runs had users been replicated to candidates."},
};

// Of the models that keep states of users.
struct UserCacheInfo {
  double (*value)(const runtime::UserCacheCounts&);
  std::string_view name;
  std::string_view type;
  std::string_view help;
};

template <auto member>
double count_of(const runtime::UserCacheCounts& counts) {
  return static_cast<double>((counts.*member).load());
}

constexpr UserCacheInfo kUserCache[] = {
    {count_of<&runtime::UserCacheCounts::hits>, "ikbo_user_cache_hits_total", "counter",
     "Users of runs whose state was in the cache."},
    {count_of<&runtime::UserCacheCounts::misses>, "ikbo_user_cache_misses_total", "counter",
     "Users of runs whose state was not in the cache."},
    {count_of<&runtime::UserCacheCounts::evictions>, "ikbo_user_cache_evictions_total", "counter",
     "States let go to make room for others."},
    {count_of<&runtime::UserCacheCounts::expirations>, "ikbo_user_cache_expirations_total",
     "counter", "States let go at the end of their time."},
    {count_of<&runtime::UserCacheCounts::bytes>, "ikbo_user_cache_bytes", "gauge",
     "Bytes of the states in the cache."},
    {count_of<&runtime::UserCacheCounts::entries>, "ikbo_user_cache_entries", "gauge",
     "States in the cache."},
};

constexpr std::string_view kSpanOutcomes[kNumSpanOutcomes] = {"sent", "dropped", "failed"};

// The models' labels, and each family of metrics in turn.
class Page {
 public:
  explicit Page(const std::vector<LabelledMetrics>& models) : models_(models) {
    labels_.reserve(models.size());
    for (const LabelledMetrics& model : models) {
      labels_.push_back(label("model", model.model) + "," + label("version", model.version));
    }
  }

  // `write` gets the metrics of each model and its labels.
  template <typename Write>
  void family(std::string_view name, std::string_view type, std::string_view help,
              const Write& write) {
    write_head(name, type, help, out_);
    for (std::size_t i = 0; i < models_.size(); ++i) {
      write(*models_[i].metrics, labels_[i]);
    }
  }

  void user_cache(const UserCacheInfo& info) {
    write_head(info.name, info.type, info.help, out_);
    for (std::size_t i = 0; i < models_.size(); ++i) {
      if (models_[i].user_cache != nullptr) {
        sample(info.name, labels_[i], text_of(info.value(*models_[i].user_cache)));
      }
    }
  }

  void sample(std::string_view name, const std::string& labels, const std::string& value) {
    write_sample(name, "", labels, value, out_);
  }

  std::string& out() { return out_; }

 private:
  const std::vector<LabelledMetrics>& models_;
  std::vector<std::string> labels_;
  std::string out_;
};

void write_models(Page& page) {
  page.family("ikbo_requests_total", "counter", "Infer requests by model and HTTP status.",
              [&](const ModelMetrics& model, const std::string& labels) {
                model.requests.write("ikbo_requests_total", labels, page.out());
              });
  for (const HistogramInfo& info : kHistograms) {
    page.family(info.name, "histogram", info.help,
                [&](const ModelMetrics& model, const std::string& labels) {
                  (model.*info.member).write(info.name, labels, page.out());
                });
  }
  page.family("ikbo_queued_requests", "gauge", "Requests that wait for a run.",
              [&](const ModelMetrics& model, const std::string& labels) {
                page.sample("ikbo_queued_requests", labels, text_of(model.queued_requests.load()));
              });
  for (const CounterInfo& info : kCounters) {
    page.family(info.name, "counter", info.help,
                [&](const ModelMetrics& model, const std::string& labels) {
                  page.sample(info.name, labels, text_of((model.*info.member).load()));
                });
  }
  for (const CostInfo& info : kCosts) {
    page.family(info.name, "counter", info.help,
                [&](const ModelMetrics& model, const std::string& labels) {
                  if (model.has_costs) {
                    page.sample(info.name, labels, text_of((model.*info.member).load()));
                  }
                });
  }
  for (const UserCacheInfo& info : kUserCache) {
    page.user_cache(info);
  }
}

void write_server(const ServerMetrics& server, std::string& out) {
  write_head("ikbo_errors_total", "counter", "Refused requests and dropped connections by kind.",
             out);
  for (int i = 0; i < kNumErrorKinds; ++i) {
    write_sample("ikbo_errors_total", "", label("kind", info_of(static_cast<ErrorKind>(i)).name),
                 text_of(server.errors[static_cast<std::size_t>(i)].load()), out);
  }
  write_head("ikbo_connections", "gauge", "Open client connections.", out);
  write_sample("ikbo_connections", "", "", text_of(server.connections.load()), out);
  write_head("ikbo_trace_spans_total", "counter", "Spans of traces by what became of them.", out);
  for (std::size_t i = 0; i < kNumSpanOutcomes; ++i) {
    write_sample("ikbo_trace_spans_total", "", label("outcome", kSpanOutcomes[i]),
                 text_of(server.spans[i].load()), out);
  }
}

// Families without samples in a process that uses no GPU.
void write_gpu(const std::optional<runtime::GpuCounts>& counts, std::string& out) {
  const auto sample = [&](std::string_view name, std::string_view key, std::string_view value,
                          std::int64_t runtime::GpuCounts::* count) {
    if (counts.has_value()) {
      const std::string labels = key.empty() ? std::string() : label(key, value);
      write_sample(name, "", labels, text_of((*counts).*count), out);
    }
  };
  write_head("ikbo_gpu_runs_total", "counter",
             "Runs on the GPU: as one CUDA graph, or kernel by kernel.", out);
  sample("ikbo_gpu_runs_total", "launch", "graph", &runtime::GpuCounts::graph_runs);
  sample("ikbo_gpu_runs_total", "launch", "kernels", &runtime::GpuCounts::plain_runs);
  write_head("ikbo_gpu_allocations_total", "counter",
             "Times that CUDA was asked for memory of the GPU, or for pinned memory of the host.",
             out);
  sample("ikbo_gpu_allocations_total", "memory", "device", &runtime::GpuCounts::device_allocations);
  sample("ikbo_gpu_allocations_total", "memory", "pinned", &runtime::GpuCounts::pinned_allocations);
  write_head("ikbo_gpu_memory_bytes", "gauge", "Bytes of the GPU that PyTorch's allocator holds.",
             out);
  sample("ikbo_gpu_memory_bytes", "", "", &runtime::GpuCounts::device_bytes);
}

void write_user_cache(const runtime::UserCacheCounts& counts, JsonWriter& json) {
  json.key("user_cache").begin_object();
  json.key("hit_count").number(counts.hits.load());
  json.key("miss_count").number(counts.misses.load());
  json.key("hit_rate").number(counts.hit_rate());
  json.key("eviction_count").number(counts.evictions.load());
  json.key("expiration_count").number(counts.expirations.load());
  json.key("entry_count").number(counts.entries.load());
  json.key("bytes").number(counts.bytes.load());
  json.end_object();
}

}  // namespace

std::string write_metrics(const ServerMetrics& server, const std::vector<LabelledMetrics>& models,
                          const std::optional<runtime::GpuCounts>& gpu) {
  Page page(models);
  write_models(page);
  write_server(server, page.out());
  write_gpu(gpu, page.out());
  return std::move(page.out());
}

std::string encode_stats(const std::vector<LabelledMetrics>& models, std::string_view name,
                         std::string_view version) {
  std::string text;
  JsonWriter json(text);
  json.begin_object().key("model_stats").begin_array();
  for (const LabelledMetrics& model : models) {
    if (model.model == name && (version.empty() || model.version == version)) {
      json.begin_object();
      json.key("name").string(model.model);
      json.key("version").string(model.version);
      model.metrics->stats.write(json);
      if (model.user_cache != nullptr) {
        write_user_cache(*model.user_cache, json);
      }
      json.end_object();
    }
  }
  json.end_array().end_object();
  return text;
}

}  // namespace ikbo::server
