// Makes one Prometheus family.
#pragma once

#include <prometheus/metric_family.h>

#include <cstddef>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "ballast/storage/io/duration_histogram.h"

namespace ballast::services {

using Families = std::vector<prometheus::MetricFamily>;
using Labels = std::vector<prometheus::ClientMetric::Label>;

// The destructor hands the family over, unless it has no series: a HELP line about nothing is left out.
class Family {
 public:
  Family(Families* out, std::string name, std::string help, prometheus::MetricType type)
      : out_(out), family_{std::move(name), std::move(help), type, {}} {}
  Family(const Family&) = delete;
  Family& operator=(const Family&) = delete;
  ~Family() {
    if (!family_.metric.empty()) out_->push_back(std::move(family_));
  }

  template <typename Number>
  Family& Add(Labels labels, Number value) {
    prometheus::ClientMetric& metric = Next(std::move(labels));
    const bool counter = family_.type == prometheus::MetricType::Counter;
    (counter ? metric.counter.value : metric.gauge.value) = static_cast<double>(value);
    return *this;
  }

  Family& Add(Labels labels, const storage::DurationHistogram& histogram) {
    prometheus::ClientMetric::Histogram& out = Next(std::move(labels)).histogram;
    const absl::Span<const double> bounds = histogram.bounds_seconds();
    uint64_t cumulative = 0;
    for (size_t i = 0; i <= bounds.size(); ++i) {
      cumulative += histogram.count(i);
      out.bucket.push_back({cumulative, i == bounds.size() ? std::numeric_limits<double>::infinity() : bounds[i]});
    }
    out.sample_count = cumulative;
    out.sample_sum = histogram.sum_seconds();
    return *this;
  }

 private:
  prometheus::ClientMetric& Next(Labels labels) {
    prometheus::ClientMetric& metric = family_.metric.emplace_back();
    metric.label = std::move(labels);
    return metric;
  }

  Families* const out_;
  prometheus::MetricFamily family_;
};

class Gauge : public Family {
 public:
  Gauge(Families* out, std::string name, std::string help)
      : Family(out, std::move(name), std::move(help), prometheus::MetricType::Gauge) {}
};
class Counter : public Family {
 public:
  Counter(Families* out, std::string name, std::string help)
      : Family(out, std::move(name), std::move(help), prometheus::MetricType::Counter) {}
};
class Histogram : public Family {
 public:
  Histogram(Families* out, std::string name, std::string help)
      : Family(out, std::move(name), std::move(help), prometheus::MetricType::Histogram) {}
};

}  // namespace ballast::services
