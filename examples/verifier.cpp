// A verifier as a program: c++ -O2 -o verifier examples/verifier.cpp && truedraw audit process ./verifier
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>
using Row = std::vector<double>;

// The numbers of each innermost list behind "key": a flat list is one row. Strings ("NaN") end in an error.
static std::vector<Row> rows(const std::string& line, const std::string& key) {
    std::vector<Row> found;
    size_t at = line.find("\"" + key + "\":") + key.size() + 3;
    int depth = 0;
    do {
        char c = line[at];
        if (c == '[') { ++depth; found.emplace_back(); ++at; }
        else if (c == ']') { --depth; ++at; }
        else if (c == '"') throw std::runtime_error("a row holds what is no number");
        else if (c == ',' || c == ' ') ++at;
        else if (depth) { char* end; found.back().push_back(std::strtod(&line[at], &end)); at = end - line.data(); }
    } while (depth > 0);
    found.erase(std::remove_if(found.begin(), found.end(), [](const Row& row) { return row.empty(); }), found.end());
    return found;
}

static void check(const std::vector<Row>& law) {
    for (const Row& row : law) {
        double sum = 0, least = 0;
        for (double mass : row) { sum += mass; least = std::min(least, mass); }
        if (!(std::abs(sum - 1) < 1e-3 && least >= 0)) throw std::runtime_error("a row is no law");
    }
}

// The first token whose cumulated weight exceeds u times the total.
static int draw(const Row& weights, double u) {
    double total = 0, below = 0;
    int last = 0;
    for (double weight : weights) total += weight;
    for (int token = 0; token < (int)weights.size(); ++token) {
        if (weights[token] > 0) last = token;
        if ((below += weights[token]) > u * total) return last;
    }
    return last;
}

int main() {
    std::cout << "{\"protocol\": 1, \"name\": \"example in C++\", \"uniforms\": true}" << std::endl;
    for (std::string line; std::getline(std::cin, line);) {
        std::cout << "{\"id\": " << std::atoll(&line[line.find("\"id\":") + 5]);
        try {
            auto p = rows(line, "p"), q = rows(line, "q"), drafts = rows(line, "drafts");
            Row u = rows(line, "uniforms").at(0);
            check(p), check(q);
            int k = drafts.empty() ? 0 : drafts[0].size(), vocab = p.at(0).size(), accepted = 0;
            Row weights = p.at(k);  // of the token behind the accepted drafts: the bonus, unless one is rejected
            for (; accepted < k; ++accepted) {
                int x = drafts[0][accepted];
                const Row& row = p[accepted];
                Row law = q.empty() ? Row(vocab) : q[accepted];
                bool inside = 0 <= x && x < vocab;
                if (q.empty() && inside) law[x] = 1;
                law.resize(vocab);
                if (inside && u[accepted] * law[x] < row[x]) continue;
                for (int y = 0; y < vocab; ++y) weights[y] = std::max(row[y] - law[y], 0.0);
                if (*std::max_element(weights.begin(), weights.end()) == 0) weights = row;
                break;
            }
            int token = draw(weights, u.at(k));
            std::cout << ", \"accepted\": " << accepted << ", \"token\": " << token << "}" << std::endl;
        } catch (const std::exception& error) {
            std::cout << ", \"error\": \"" << error.what() << "\"}" << std::endl;
        }
    }
}
